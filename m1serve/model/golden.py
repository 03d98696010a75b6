"""Golden sequences: logprobs recorded when a version is written, reproduced by whoever loads it.

Shapes: T tokens, E hidden, V vocabulary, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m1serve.errors import WeightsError
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.manifest import Golden, Manifest
from m1serve.model.spelling import is_number
from m1serve.model.state import SequenceState


@torch.no_grad()
def sequence_logprobs(model: M1ForCausalLM, token_ids: Sequence[int]) -> Tensor:
    """fp32 [T - 1] on the CPU: log p of each token after the first, given those before it."""
    device = model.lm_head.weight.device
    ids_1T = torch.tensor([list(token_ids)], device=device)
    hidden_1TE, _ = model.hidden(ids_1T)
    return model.token_logprobs(hidden_1TE[0, :-1], ids_1T[0, 1:]).logprob_T.cpu()


def record_golden(model: M1ForCausalLM, sequences: Sequence[Sequence[int]]) -> tuple[Golden, ...]:
    """WeightsError when the model's logprobs are not finite: such weights must not be written."""
    golden = []
    for token_ids in sequences:
        logprobs = sequence_logprobs(model, token_ids)
        if not logprobs.isfinite().all():
            raise WeightsError(
                "the model's logprobs are not finite, its weights have diverged; "
                "train again from the parent with a lower learning rate"
            )
        golden.append(Golden(token_ids=tuple(token_ids), logprobs=tuple(logprobs.tolist())))
    return tuple(golden)


def golden_gap(model: M1ForCausalLM, manifest: Manifest) -> tuple[float, float]:
    """Mean and largest |logprob - recorded| over all golden tokens; nan when a weight is.

    WeightsError when there are none, or ones that the model could not have said.
    """
    if not any(golden.logprobs for golden in manifest.golden):
        raise WeightsError(
            f"{manifest.weights_version} has no golden sequences to be checked with; "
            "write the version again with golden_prompts"
        )
    for place, golden in enumerate(manifest.golden):
        if not _is_sound(golden, model.config.vocab_size):
            raise WeightsError(
                f"golden sequence {place} of {manifest.weights_version} is not one of this model: "
                f"wanted token ids below {model.config.vocab_size} and one logprob fewer, "
                f"got {len(golden.token_ids)} and {len(golden.logprobs)}; write the version "
                "again with golden_prompts"
            )
    gaps = torch.cat(
        [
            (sequence_logprobs(model, golden.token_ids) - torch.tensor(golden.logprobs)).abs()
            for golden in manifest.golden
        ]
    )
    return float(gaps.mean()), float(gaps.max())


def _is_sound(golden: Golden, vocab_size: int) -> bool:
    ids, logprobs = golden.token_ids, golden.logprobs
    are_ids = all(type(i) is int and 0 <= i < vocab_size for i in ids)
    return are_ids and len(ids) - 1 == len(logprobs) and all(map(is_number, logprobs))


@torch.no_grad()
def sample_sequences(
    model: M1ForCausalLM, start: Sequence[int], *, num_rows: int = 4, num_tokens: int = 64
) -> list[list[int]]:
    """Seeded samples of the model's own, for a version that comes without golden prompts."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.tensor([list(start)] * num_rows)
    state = SequenceState.allocate(model.config, num_rows, len(start) + num_tokens)
    hidden, state = model.hidden(ids_BT, state)
    columns = [ids_BT]
    for _ in range(num_tokens):
        p_BV = torch.softmax(model.logits(hidden[:, -1]), -1)
        columns.append(torch.multinomial(p_BV, 1, generator=generator))
        hidden, state = model.hidden(columns[-1], state)
    rows: list[list[int]] = torch.cat(columns, 1).tolist()
    return rows
