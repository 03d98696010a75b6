"""Traps of what sequences carry from call to call: each put back is seen, the model itself passes.

A sequence is read in two pieces; MiniMax's own logits of one forward are what must come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from m1serve.kernels.lightning import lightning_rows
from m1serve.model import lightning
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.state import SequenceState
from m1serve.model.step import Step

TOLERANCE = 2e-5
CUT = 300
BLOCK = 256
"""Of the kernel that decays a short chunk as a full one."""
StateTrap = Callable[[SequenceState], None]


def bf16_state(state: SequenceState) -> None:
    for layer, s in state.lightning.items():
        state.lightning[layer] = s.bfloat16().float()


def keys_without_the_lightning_state(state: SequenceState) -> None:
    """A prefix cache that hits for softmax layers only."""
    state.lightning.clear()


def length_is_0(state: SequenceState) -> None:
    """A cache that asks its first layer, a lightning one, how long it is."""
    state.length_B = torch.zeros_like(state.length_B)


def transposed_state(state: SequenceState) -> None:
    """Value dim x key dim, as some kernels keep it."""
    for layer, s in state.lightning.items():
        state.lightning[layer] = s.transpose(-1, -2).contiguous()


def late_snapshot(state: SequenceState) -> None:
    """Keys one token shorter than the state that was stored with them."""
    for group in (state.keys, state.values):
        for layer, t in group.items():
            group[layer] = t[:, :, :-1]
    state.length_B = state.length_B - 1


def nothing(state: SequenceState) -> None:
    """No trap."""


@torch.no_grad()
def continued_error(
    model: M1ForCausalLM, golden: dict[str, Any], trap: StateTrap = nothing
) -> float:
    """Of the tokens behind CUT, read from the state that the first CUT tokens left."""
    ids_1T = golden["ids"][:1]
    _, state = model.hidden(ids_1T[:, :CUT])
    trap(state)
    logits = model.logits(model.hidden(ids_1T[:, CUT:], state)[0])
    error: float = (logits[0] - golden["full"][0, CUT:]).abs().max().item()
    return error


@pytest.mark.parametrize(
    "trap",
    [
        bf16_state,
        keys_without_the_lightning_state,
        length_is_0,
        transposed_state,
        late_snapshot,
    ],
)
def test_a_trap_in_the_state_is_seen(
    trap: StateTrap, golden: dict[str, Any], golden_model: Callable[..., M1ForCausalLM]
) -> None:
    model = golden_model()
    assert continued_error(model, golden) < TOLERANCE
    assert continued_error(model, golden, trap) > 10 * TOLERANCE


def test_positions_that_restart_with_a_continuation_are_seen(
    golden: dict[str, Any],
    golden_model: Callable[..., M1ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, build = golden_model(), Step.build

    def restarted(*given: Any) -> Step:
        config, length_B, *rest = given
        fresh = build(config, torch.zeros_like(length_B), *rest)
        return replace(build(*given), cos_b1TR=fresh.cos_b1TR, sin_b1TR=fresh.sin_b1TR)

    monkeypatch.setattr(Step, "build", restarted)
    assert continued_error(model, golden) > 10 * TOLERANCE


def test_a_mask_that_restarts_with_a_continuation_is_seen(
    golden: dict[str, Any],
    golden_model: Callable[..., M1ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' continued prefill: a further piece looks at the first keys, not at its own."""

    def restarted(step: Step) -> Tensor:
        mask_TL = torch.ones(step.pos_BT.shape[1], step.num_columns, dtype=torch.bool).tril()
        return mask_TL.repeat(step.num_groups, 1)[None, None]

    monkeypatch.setattr(Step, "mask_b1QL", property(restarted))
    assert continued_error(golden_model(), golden) > 10 * TOLERANCE


def test_a_short_chunk_that_decays_as_a_full_one_is_seen(
    golden: dict[str, Any],
    golden_model: Callable[..., M1ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(
        q: Tensor, k: Tensor, v: Tensor, slope_H: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        o, after = lightning_rows(q, k, v, slope_H, *rest)
        return o, after * torch.exp(-slope_H * (-q.shape[1] % BLOCK))[:, None, None]

    monkeypatch.setattr(lightning, "lightning_rows", rows)
    assert continued_error(golden_model(), golden) > 10 * TOLERANCE


@torch.no_grad()
def test_pads_to_the_left_are_seen(
    golden: dict[str, Any], golden_model: Callable[..., M1ForCausalLM]
) -> None:
    """A row whose pads are read as tokens is another row; ours are packed or padded right."""
    model, row_1T = golden_model(), golden["ids"][1:]
    assert (model(row_1T[:, 37:]) - golden["solo"]).abs().max() < TOLERANCE
    assert (model(row_1T)[:, 37:] - golden["solo"]).abs().max() > 10 * TOLERANCE


@torch.no_grad()
def test_pads_to_the_right_that_advance_the_state_are_seen(
    golden: dict[str, Any], golden_model: Callable[..., M1ForCausalLM]
) -> None:
    model, ids_1T = golden_model(), golden["ids"][:1]
    padded_1T = torch.cat([ids_1T[:, :CUT], torch.zeros(1, 37, dtype=torch.int64)], 1)
    wanted_V = golden["full"][0, CUT]
    errors = []
    for count_B in (torch.tensor([CUT]), None):
        pool = SequenceState.allocate(model.config, 1, 560)
        model.hidden(padded_1T, pool, count_B)
        hidden, _ = model.hidden(ids_1T[:, CUT : CUT + 1], pool)
        errors.append((model.logits(hidden)[0, 0] - wanted_V).abs().max().item())
    assert errors[0] < TOLERANCE
    assert errors[1] > 10 * TOLERANCE


class LeakyModel:
    """Keeps the lightning state on the model and forgets it only when the batch size changes."""

    def __init__(self, model: M1ForCausalLM) -> None:
        self.model = model
        self.kept: dict[int, Tensor] = {}

    def __call__(self, ids_BT: Tensor) -> Tensor:
        state = SequenceState.empty(len(ids_BT))
        if self.kept and len(self.kept[0]) == len(ids_BT):
            state.lightning = dict(self.kept)
        hidden, after = self.model.hidden(ids_BT, state)
        self.kept = after.lightning
        return self.model.logits(hidden)


@torch.no_grad()
def test_requests_that_see_each_other_are_seen(
    golden: dict[str, Any], golden_model: Callable[..., M1ForCausalLM]
) -> None:
    """A alone, then B, then A again, then both together: always the same logits."""
    model = golden_model()
    a, b = golden["ids"][:1, :200], golden["ids"][1:, 37:237]
    wanted = [golden["full"][:1, :200], golden["solo"][:, :200]]

    def errors(run: Callable[[Tensor], Tensor]) -> list[float]:
        alone = [run(a) - wanted[0], run(b) - wanted[1], run(a) - wanted[0]]
        return [e.abs().max().item() for e in (*alone, run(torch.cat([a, b])) - torch.cat(wanted))]

    assert max(errors(model)) < TOLERANCE
    leaky = errors(LeakyModel(model))
    assert leaky[0] < TOLERANCE
    assert min(leaky[1:3]) > 10 * TOLERANCE
