"""Which state slots a prefill reads and writes, checked on the host before any launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from m1serve.kernels import checks
from m1serve.kernels.plan import NO_SLOT, Snapshot


def state_slots(
    slots: Sequence[int] | Tensor | None, pool_SHDD: Tensor | None, name: str, count: int
) -> list[int]:
    """One slot a sequence, NO_SLOT for all where none are given."""
    if slots is None:
        return [NO_SLOT] * count
    if pool_SHDD is None:
        raise ValueError(f"{name} is given without a pool, wanted pool_SHDD with the states")
    found = [max(slot, NO_SLOT) for slot in checks.check_slots(slots, pool_SHDD, name)]
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} entries, wanted {count}: one a sequence")
    return found


def check_snapshots(
    snapshots: Sequence[Snapshot], bounds: Sequence[int], pool_SHDD: Tensor | None
) -> None:
    if snapshots and pool_SHDD is None:
        raise ValueError("snapshots are given without a pool, wanted pool_SHDD to keep them in")
    for snapshot in snapshots:
        if not isinstance(snapshot, Snapshot):
            raise ValueError(f"snapshots holds {snapshot!r}, wanted Snapshot(sequence, ...)")
        if not 0 <= snapshot.sequence < len(bounds) - 1:
            raise ValueError(f"{snapshot} names none of the {len(bounds) - 1} sequences")
        length = bounds[snapshot.sequence + 1] - bounds[snapshot.sequence]
        if not 0 < snapshot.num_tokens <= length:
            raise ValueError(f"{snapshot} is not within its sequence, wanted 1 to {length} tokens")
        if pool_SHDD is not None and not 0 <= snapshot.slot < pool_SHDD.shape[0]:
            raise ValueError(f"{snapshot} has no slot in a pool of {pool_SHDD.shape[0]}")


def check_owners(
    initial: Sequence[int], final: Sequence[int], snapshots: Sequence[Snapshot]
) -> None:
    """A slot is written once, and by a sequence that no other starts from."""
    writers = [(slot, n, "final_slots") for n, slot in enumerate(final)]
    writers += [(s.slot, s.sequence, "snapshots") for s in snapshots]
    written: dict[int, int] = {}
    for slot, n, name in writers:
        if slot == NO_SLOT:
            continue
        if slot in written:
            raise ValueError(f"{name} writes slot {slot} twice, wanted distinct slots")
        written[slot] = n
    for n, slot in enumerate(initial):
        if written.get(slot, n) != n:
            raise ValueError(
                f"sequence {n} starts from slot {slot}, which sequence {written[slot]} overwrites: "
                "wanted another slot for that sequence's state"
            )
    for snapshot in snapshots:
        if snapshot.slot == initial[snapshot.sequence]:
            raise ValueError(f"{snapshot} overwrites the slot its sequence starts from")
