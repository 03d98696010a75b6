"""What each replica serves, as it said itself after its last swap."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from m1serve.store.audit import AuditEntry, write_audit
from m1serve.store.work_tables import DeploymentRow
from m1serve.types import Slot, SwapReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    replica: str
    slot: Slot
    model_id: str
    weights_version: str
    """What serves."""
    wanted_version: str
    """What it was last asked to load."""
    is_accepted: bool
    reason: str
    report: Mapping[str, object]
    verified_at: float


def save_deployment(
    session: Session, replica: str, slot: Slot, wanted_version: str, report: SwapReport
) -> None:
    now = time.time()
    row = session.get(DeploymentRow, (replica, slot.value), with_for_update=True)
    before = row.weights_version if row is not None else None
    if row is None:
        row = DeploymentRow(replica=replica, slot=slot.value)
        session.add(row)
    row.model_id = wanted_version.rpartition("@")[0]
    row.weights_version, row.wanted_version = report.weights_version, wanted_version
    row.is_accepted, row.reason, row.verified_at = report.is_accepted, report.reason, now
    row.report = {
        "phases_ms": dict(report.phases_ms),
        "parity_mean": report.parity_mean,
        "parity_max": report.parity_max,
    }
    entry = AuditEntry(
        at=now,
        actor=replica,
        action="deploy.accepted" if report.is_accepted else "deploy.refused",
        subject=wanted_version,
        before=before,
        after=report.weights_version,
        reason=report.reason,
    )
    write_audit(session, entry)


def list_deployments(session: Session, model_id: str | None) -> list[Deployment]:
    query = select(DeploymentRow).order_by(DeploymentRow.replica, DeploymentRow.slot)
    if model_id is not None:
        query = query.where(DeploymentRow.model_id == model_id)
    return [
        Deployment(
            replica=row.replica,
            slot=Slot(row.slot),
            model_id=row.model_id,
            weights_version=row.weights_version,
            wanted_version=row.wanted_version,
            is_accepted=row.is_accepted,
            reason=row.reason,
            report=row.report,
            verified_at=row.verified_at,
        )
        for row in session.scalars(query)
    ]
