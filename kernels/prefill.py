"""Runs pieces of packed sequences on the GPU: plans them, picks the walk, launches.

Shapes: T tokens, H heads, D head dim, S state slots.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from m1serve.kernels import walk as portable
from m1serve.kernels.plan import FOREVER, Piece, Plan, best_columns, make_plan

try:
    from m1serve.kernels import hopper
except (ImportError, AttributeError):  # a triton without Gluon, or with another Gluon
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
    device, D = q_THD.device, q_THD.shape[2]
    work = _work(pieces, windows(slope_H), D, device, reverse)
    run_work(
        q_THD, k_THD, v_THD, o_THD, slope_H, work, source_SHDD, target_SHDD, reverse=reverse
    )  # fmt: skip


def run_work(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    o_THD: Tensor,
    slope_H: Tensor,
    work: Work,
    source_SHDD: Tensor | None,
    target_SHDD: Tensor | None,
    *,
    reverse: bool = False,
) -> None:
    """As `run_pieces`, for pieces already planned in the direction of the walk."""
    work.join()
    columns = work.plan.columns
    run_items(
        q_THD, k_THD, v_THD, o_THD, slope_H, work.whole_I4, source_SHDD, target_SHDD,
        reverse=reverse, columns=columns,
    )  # fmt: skip
    if not work.plan.segments:
        return
    with _current(q_THD.device):
        start_SHDD = portable.segment_starts(
            k_THD, v_THD, slope_H, work.runs_R5, work.chains_G4, len(work.plan.segments),
            source_SHDD, reverse=reverse,
        )  # fmt: skip
    run_items(
        q_THD, k_THD, v_THD, o_THD, slope_H, work.segments_I4, start_SHDD, target_SHDD,
        reverse=reverse, columns=columns,
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
    columns: int | None = None,
) -> None:
    """As `run_pieces` for a device table of (row, tokens, source, target), walked as they are."""
    num_items, (_, H, D) = items_I4.shape[0], q_THD.shape
    if not num_items:
        return
    walk: Callable[..., None] = portable.walk
    if hopper is not None and hopper.fits(q_THD, k_THD, v_THD, o_THD):
        columns = columns or best_columns(num_items, H, D, _num_sms(q_THD.device))
        walk = partial(hopper.walk, columns=columns)
    with _current(q_THD.device):
        walk(
            q_THD, k_THD, v_THD, o_THD, slope_H, items_I4, source_SHDD, target_SHDD,
            reverse=reverse,
        )  # fmt: skip


def windows(slope_H: Tensor) -> tuple[int, ...]:
    """After how many tokens a head's state has forgotten one, to fp32; FOREVER while capturing.

    The first call for a tensor of slopes, or after its values changed, waits for the device.
    """
    known: tuple[int, tuple[int, ...]] | None = _windows.get(slope_H)  # type: ignore[no-untyped-call]
    # inference tensors count no versions; nothing but inference could have changed them
    version = 0 if slope_H.is_inference() else slope_H._version
    found = known[1] if known is not None and known[0] == version else None
    if found is None:
        if slope_H.is_cuda and torch.cuda.is_current_stream_capturing():
            return (FOREVER,) * slope_H.shape[0]
        found = tuple(
            min(int(portable.FORGOTTEN / s) + 1, FOREVER) if s > 0 else FOREVER
            for s in slope_H.tolist()
        )
        _windows[slope_H] = (version, found)
    return found


# by identity and weakly: a model's slopes live as long as its layers
_windows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Work:
    """A plan and its numbers on the device, in one copy that any stream may use after `join`."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        whole, segments = (
            [n for i in items for n in (i.row, i.num_tokens, i.source, i.target)]
            for items in (plan.whole, plan.segments)
        )
        runs = [n for r in plan.runs for n in (r.row, r.num_tokens, r.start_of, r.ahead, r.fade)]
        chains = [n for c in plan.chains for n in (c.first, c.last, c.source, c.final)]
        self.numbers = torch.tensor(whole + segments + runs + chains, dtype=torch.int64)
        if device.type == "cuda":
            self._copy()
        sizes = [len(whole), len(segments), len(runs), len(chains)]
        parts = torch.split(self.numbers, sizes)
        self.whole_I4, self.segments_I4 = parts[0].view(-1, 4), parts[1].view(-1, 4)
        self.runs_R5, self.chains_G4 = parts[2].view(-1, 5), parts[3].view(-1, 4)

    def _copy(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a prefill of lengths and slopes that never ran is being captured, wanted one "
                "call of it before the capture: that copies its tables to the device"
            )
        # from pageable memory, which the driver reads before it returns: the host does not wait
        self.numbers = self.numbers.to(self.device, non_blocking=True)
        self.stream = torch.cuda.current_stream(self.device)
        self.copied = self.stream.record_event()

    def join(self) -> None:
        """Order the copy before what the current stream does next, and keep it until then."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        elif stream != self.stream:
            stream.wait_event(self.copied)
            self.numbers.record_stream(stream)


# a graph reads its tables for as long as it may be replayed
_captured: set[Work] = set()


# the layers of a model run the same pieces one after the other
@lru_cache(maxsize=256)
def _work(
    pieces: tuple[Piece, ...],
    head_windows: tuple[int, ...],
    head_dim: int,
    device: torch.device,
    reverse: bool,
) -> Work:
    plan = make_plan(pieces, head_windows, head_dim, _num_sms(device), reverse=reverse)
    return Work(plan, device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
