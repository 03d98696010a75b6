"""Arrows of the weight versions and their targets, inside somebody's transaction.

Each is a compare-and-set with a reason and an audit row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import update
from sqlalchemy.orm import Session

from m1serve.errors import StoreError
from m1serve.store.audit import AuditEntry, write_audit
from m1serve.store.database import changed
from m1serve.store.work_tables import TargetRow, WeightsRow
from m1serve.types import Slot, VersionRef, VersionState

_ARROWS: dict[VersionState, frozenset[VersionState]] = {
    VersionState.CANDIDATE: frozenset({VersionState.VERIFIED, VersionState.REJECTED}),
    VersionState.VERIFIED: frozenset({VersionState.GATED, VersionState.REJECTED}),
    VersionState.GATED: frozenset(
        {VersionState.CANARY, VersionState.ACTIVE, VersionState.REJECTED}
    ),
    VersionState.CANARY: frozenset(
        {VersionState.ACTIVE, VersionState.REJECTED, VersionState.ROLLED_BACK}
    ),
    VersionState.ACTIVE: frozenset({VersionState.RETIRED, VersionState.ROLLED_BACK}),
    VersionState.RETIRED: frozenset({VersionState.ACTIVE}),
    VersionState.REJECTED: frozenset(),
    VersionState.ROLLED_BACK: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsVersion:
    weights_version: str
    model_id: str
    number: int
    path: str
    parent: str | None
    run_id: str | None
    manifest_digest: str
    state: VersionState
    reason: str
    """Of the last arrow."""
    created_at: float
    updated_at: float

    @property
    def ref(self) -> VersionRef:
        return VersionRef(weights_version=self.weights_version, path=self.path)


def version_number(weights_version: str) -> int:
    """The n of `<model_id>@<n>`."""
    model_id, at, number = weights_version.rpartition("@")
    if not at or not model_id or not number.isdecimal():
        raise StoreError(f"weights version {weights_version!r} is not of the form <model_id>@<n>")
    return int(number)


def weights_row(
    *,
    weights_version: str,
    path: str,
    parent: str | None,
    run_id: str | None,
    state: VersionState,
    manifest_digest: str,
    reason: str,
    now: float,
) -> WeightsRow:
    return WeightsRow(
        weights_version=weights_version,
        model_id=weights_version.rpartition("@")[0],
        number=version_number(weights_version),
        path=path,
        parent=parent,
        run_id=run_id,
        manifest_digest=manifest_digest,
        state=state.value,
        reason=reason,
        created_at=now,
        updated_at=now,
    )


def move_state(
    session: Session,
    weights_version: str,
    arrow: tuple[VersionState, VersionState],
    reason: str,
    actor: str,
) -> bool:
    """One compare-and-set with its audit row; False when the version is not in the state it should
    leave.
    """
    before, after = arrow
    if after not in _ARROWS[before]:
        raise StoreError(
            f"{weights_version}: no arrow from {before.value} to {after.value}; "
            f"allowed are {sorted(s.value for s in _ARROWS[before])}"
        )
    now = time.time()
    step = (
        update(WeightsRow)
        .where(WeightsRow.weights_version == weights_version, WeightsRow.state == before.value)
        .values(state=after.value, reason=reason, updated_at=now)
    )
    if changed(session, step) == 0:
        return False
    write_audit(
        session,
        AuditEntry(
            at=now,
            actor=actor,
            action=f"weights.{after.value}",
            subject=weights_version,
            before=before.value,
            after=after.value,
            reason=reason,
        ),
    )
    return True


def move_target(
    session: Session, model_id: str, slot: Slot, weights_version: str | None, reason: str
) -> None:
    row = session.get(TargetRow, (model_id, slot.value), with_for_update=True)
    before = row.weights_version if row is not None else None
    now = time.time()
    if row is not None and weights_version is None:
        session.delete(row)
    elif row is not None and weights_version is not None:
        row.weights_version, row.updated_at = weights_version, now
    elif weights_version is not None:
        session.add(
            TargetRow(
                model_id=model_id, slot=slot.value, weights_version=weights_version, updated_at=now
            )
        )
    write_audit(
        session,
        AuditEntry(
            at=now,
            actor="store",
            action="target",
            subject=f"{model_id}/{slot.value}",
            before=before,
            after=weights_version,
            reason=reason,
        ),
    )


def known_version(
    session: Session, weights_version: str, model_id: str | None = None
) -> WeightsRow:
    row = session.get(WeightsRow, weights_version, with_for_update=True)
    if row is None or (model_id is not None and row.model_id != model_id):
        raise StoreError(f"no weights version {weights_version!r}; register or commit it first")
    return row


def as_version(row: WeightsRow) -> WeightsVersion:
    return WeightsVersion(
        weights_version=row.weights_version,
        model_id=row.model_id,
        number=row.number,
        path=row.path,
        parent=row.parent,
        run_id=row.run_id,
        manifest_digest=row.manifest_digest,
        state=VersionState(row.state),
        reason=row.reason,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
