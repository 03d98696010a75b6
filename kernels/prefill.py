"""Runs pieces of packed sequences on the GPU: plans them, picks the walk, launches.

Shapes: T tokens, H heads, D head dim, S state slots.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from m1serve.kernels import walk as portable
from m1serve.kernels.plan import Piece, Plan, make_plan

try:
    from m1serve.kernels import walk_hopper as hopper
except ImportError:  # a triton without Gluon, or with another Gluon
    hopper = None  # type: ignore[assignment]


def run_pieces(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    pieces: tuple[Piece, ...],
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> None:
    """Outputs of the pieces' tokens into o, the states after them into their target slots.

    No two pieces may share a target, and none may start from another's. `reverse` walks each piece
    from its last token to its first: o_t = q_t sum over u >= t of exp(-s (u - t)) k_u v_u^T.
    """
    _, H, D = q_THD.shape
    plan = make_plan(pieces, H, D, _num_sms(q_THD.device), reverse=reverse)
    run_plan(
        q_THD, k_THD, v_THD, o_THD, slope_H, plan, source_SHDD, target_SHDD, reverse=reverse
    )  # fmt: skip


def run_plan(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    plan: Plan,
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> None:
    """As `run_pieces`, for pieces already planned in the direction of the walk."""
    tables = _tables(plan, q_THD.device)
    if plan.chains:
        with _current(q_THD.device):
            source_SHDD = portable.segment_starts(
                k_THD, v_THD, slope_H, tables.runs_R3, tables.chains_G4, len(plan.items),
                source_SHDD, reverse=reverse,
            )  # fmt: skip
    run_items(
        q_THD, k_THD, v_THD, o_THD, slope_H, tables.items_I4, source_SHDD, target_SHDD,
        reverse=reverse,
    )  # fmt: skip


def run_items(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    items_I4: Tensor,
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> None:
    """As `run_pieces` for a device table of (row, tokens, source, target), one program each."""
    if not items_I4.shape[0]:
        return
    is_hopper = hopper is not None and hopper.fits(q_THD, k_THD, v_THD, o_THD)
    walk = hopper.walk if is_hopper else portable.walk
    with _current(q_THD.device):
        walk(
            q_THD, k_THD, v_THD, o_THD, slope_H, items_I4, source_SHDD, target_SHDD,
            reverse=reverse,
        )  # fmt: skip


class Tables:
    """A plan's numbers on the device, in one copy."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        items = [n for i in plan.items for n in (i.row, i.num_tokens, i.source, i.target)]
        runs = [n for r in plan.runs for n in (r.row, r.num_tokens, r.start_of)]
        chains = [n for c in plan.chains for n in (c.first, c.last, c.source, c.final)]
        flat = torch.tensor(items + runs + chains, dtype=torch.int64).to(device)
        parts = torch.split(flat, [len(items), len(runs), len(chains)])
        self.items_I4, self.runs_R3 = parts[0].view(-1, 4), parts[1].view(-1, 3)
        self.chains_G4 = parts[2].view(-1, 4)


# the layers of a model run the same pieces one after the other
@lru_cache(maxsize=64)
def _tables(plan: Plan, device: torch.device) -> Tables:
    return Tables(plan, device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
