"""Sampler: one draw for every decoding row; those that bend nothing cost one softmax and search."""

# mypy: allow-untyped-calls
# N rows, M bent rows, V vocabulary, K top logprobs

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from m1serve.engine.distribution import Bend, Penalty, bend, pick
from m1serve.engine.generation import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    token_N: Tensor
    """int64"""
    logprob_N: Tensor
    """fp32, the model's own at temperature 1"""
    sampled_logprob_M: Tensor | None = None
    """Of the bent rows, under what they were drawn from."""
    top_logprob_NK: Tensor | None = None
    top_id_NK: Tensor | None = None

    def start_copy(self) -> HostCopy:
        """To the host, behind what the device has been asked for by now and before all else."""
        if not self.token_N.is_cuda:
            return HostCopy(self, None)
        host = Drawn(
            token_N=_to_pinned(self.token_N),
            logprob_N=_to_pinned(self.logprob_N),
            sampled_logprob_M=_to_pinned(self.sampled_logprob_M),
            top_logprob_NK=_to_pinned(self.top_logprob_NK),
            top_id_NK=_to_pinned(self.top_id_NK),
        )
        copied = torch.cuda.Event()
        copied.record()
        return HostCopy(host, copied)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A draw on its way to the host: the step that reads its tokens may run meanwhile."""

    drawn: Drawn
    copied: torch.cuda.Event | None

    def wait(self) -> Drawn:
        if self.copied is not None:
            self.copied.synchronize()
        return self.drawn


T = TypeVar("T", Tensor, "Tensor | None")


def _to_pinned(t: T) -> T:
    """A copy that nobody waits for: torch pins the memory of such by itself."""
    return t if t is None else t.to("cpu", non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """What the present rows ask for; stays valid while no row joins, leaves or moves."""

    bent: tuple[int, ...]
    bent_M: Tensor | None
    bend: Bend | None
    constrained: tuple[int, ...]
    """Those of `bent` that have a grammar, as places in `bent`."""
    seeded: tuple[int, ...]
    steered: tuple[int, ...]
    """Rows whose next token may be forced."""
    num_top: int

    @classmethod
    def of(cls, rows: Rows[Sequence], *, vocab_size: int, device: str) -> DrawPlan:
        bent = tuple(i for i, row in enumerate(rows) if row.is_bent)
        bent_rows = [rows[i] for i in bent]
        return cls(
            bent=bent,
            bent_M=torch.tensor(bent, device=device) if bent else None,
            bend=_bend_of(bent_rows, vocab_size=vocab_size, device=device) if bent else None,
            constrained=tuple(k for k, row in enumerate(bent_rows) if row.constraint),
            seeded=tuple(i for i, row in enumerate(rows) if row.rng is not None),
            steered=tuple(
                i for i, row in enumerate(rows) if row.budget is not None or row.constraint
            ),
            num_top=max((row.request.top_logprobs for row in rows), default=0),
        )


class Sampler:
    """Only the first `vocab_size` ids are ever drawn; logprobs are over all that the model has."""

    def __init__(self, *, vocab_size: int, device: str) -> None:
        self.vocab_size = vocab_size
        self._rng = torch.Generator(device=device)
        self._rng.seed()
        self._device = device

    def plan(self, rows: Rows[Sequence]) -> DrawPlan:
        return DrawPlan.of(rows, vocab_size=self.vocab_size, device=self._device)

    def draw(self, logits_NV: Tensor, rows: Rows[Sequence], plan: DrawPlan) -> Drawn:
        """`logits_NV` are fp32. Counts the tokens into the plan's penalties."""
        logprob_NV = torch.log_softmax(logits_NV, -1)[:, : self.vocab_size]
        p_NV, bent_MV = logprob_NV.exp(), None
        if plan.bend is not None:
            logits_MV = logits_NV[plan.bent_M, : self.vocab_size]
            _mask(logits_MV, rows, plan)
            bent_MV = bend(logits_MV, plan.bend)
            p_NV[plan.bent_M] = bent_MV.exp()
        token_N = pick(p_NV, self._uniforms(rows, plan))
        _force(token_N, rows, plan)
        sampled_M = None
        if bent_MV is not None:
            drawn_M1 = token_N[plan.bent_M, None]
            sampled_M = bent_MV.gather(1, drawn_M1).squeeze(1)
            _count(plan, drawn_M1)
        top = logprob_NV.topk(plan.num_top, dim=-1) if plan.num_top else None
        return Drawn(
            token_N=token_N,
            logprob_N=logprob_NV.gather(1, token_N[:, None]).squeeze(1),
            sampled_logprob_M=sampled_M,
            top_logprob_NK=top.values if top else None,
            top_id_NK=top.indices if top else None,
        )

    def _uniforms(self, rows: Rows[Sequence], plan: DrawPlan) -> Tensor:
        u_N = torch.rand(len(rows), dtype=torch.float64, device=self._device, generator=self._rng)
        for i in plan.seeded:
            u_N[i : i + 1] = torch.rand(1, dtype=torch.float64, generator=rows[i].rng)
        return u_N


def _mask(logits_MV: Tensor, rows: Rows[Sequence], plan: DrawPlan) -> None:
    """Takes away, in place, what the grammars of this step's rows exclude."""
    places: list[int] = []
    masks: list[bytes] = []
    for k in plan.constrained:
        row = rows[plan.bent[k]]
        mask = None if row.forced or row.constraint is None else row.constraint.mask()
        if mask is not None:
            places.append(k)
            masks.append(mask)
    if not places:
        return
    # K masked rows, B bytes
    packed_KB = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
    packed_KB = packed_KB.view(len(places), -1).to(logits_MV.device)
    bit_8 = torch.arange(8, dtype=torch.uint8, device=logits_MV.device)
    allowed_KV = (packed_KB[:, :, None] >> bit_8 & 1).bool().flatten(1)[:, : logits_MV.shape[1]]
    place_K = torch.tensor(places, device=logits_MV.device)
    logits_MV[place_K] = logits_MV[place_K].masked_fill(~allowed_KV, -torch.inf)


def _force(token_N: Tensor, rows: Rows[Sequence], plan: DrawPlan) -> None:
    """Puts forced tokens, in place, where others were drawn."""
    for i in plan.steered:
        row = rows[i]
        if not row.forced and row.constraint is not None and row.constraint.is_thinking:
            row.constraint.consider(int(token_N[i]))
        if row.forced:
            token_N[i] = row.forced[0]


def seeded_rng(seed: int, choice: int) -> torch.Generator:
    """On the CPU: a seed means the same draws on every device. Each choice has its own."""
    return torch.Generator().manual_seed((seed * 1_000_003 + choice) % 2**63)


def _count(plan: DrawPlan, drawn_M1: Tensor) -> None:
    if plan.bend is not None and plan.bend.penalty is not None:
        counts_MV = plan.bend.penalty.counts_MV
        counts_MV.scatter_add_(1, drawn_M1, torch.ones_like(drawn_M1, dtype=counts_MV.dtype))


def _bend_of(rows: Rows[Sequence], *, vocab_size: int, device: str) -> Bend:
    asked = [row.request.sampling for row in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    is_greedy = [s.temperature == 0 for s in asked]
    return Bend(
        temperature_M1=column([s.temperature or 1.0 for s in asked]),
        greedy_M=torch.tensor(is_greedy, device=device) if any(is_greedy) else None,
        min_p_M1=column([s.min_p for s in asked]) if any(s.min_p for s in asked) else None,
        top_k_M1=(
            column([s.top_k or vocab_size for s in asked]) if any(s.top_k for s in asked) else None
        ),
        # rounding must not cut the tail of rows that keep everything
        top_p_M1=(
            column([s.top_p if s.top_p < 1 else 2.0 for s in asked])
            if any(s.top_p < 1 for s in asked)
            else None
        ),
        bias_MV=_bias_of(rows, vocab_size, device) if any(s.logit_bias for s in asked) else None,
        penalty=_penalty_of(rows, vocab_size, device),
    )


def _bias_of(rows: Rows[Sequence], vocab_size: int, device: str) -> Tensor:
    bias_MV = torch.zeros(len(rows), vocab_size, device=device)
    for i, row in enumerate(rows):
        for token_id, value in row.request.sampling.logit_bias:
            bias_MV[i, token_id] = value
    return bias_MV


def _penalty_of(rows: Rows[Sequence], vocab_size: int, device: str) -> Penalty | None:
    asked = [row.request.sampling for row in rows]
    if not any(
        s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1 for s in asked
    ):
        return None
    in_prompt_MV = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
    counts_MV = torch.zeros(len(rows), vocab_size, device=device)
    for i, row in enumerate(rows):
        prompt = torch.from_numpy(row.generation.prompt.array)
        in_prompt_MV[i, prompt.to(device=device, dtype=torch.int64)] = True
        said = torch.tensor(row.token_ids, dtype=torch.int64, device=device)
        counts_MV[i] = torch.bincount(said, minlength=vocab_size)
    return Penalty(
        presence_M1=torch.tensor([s.presence_penalty for s in asked], device=device)[:, None],
        frequency_M1=torch.tensor([s.frequency_penalty for s in asked], device=device)[:, None],
        repetition_M1=torch.tensor([s.repetition_penalty for s in asked], device=device)[:, None],
        in_prompt_MV=in_prompt_MV,
        counts_MV=counts_MV,
    )
