"""Runs as values: the lease its holder works under, and what anyone may see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from m1serve.store.work_tables import RunRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLease:
    run_id: str
    model_id: str
    trigger: str
    overrides: Mapping[str, object]
    token: str
    fence: int
    """1 for the first holder; above 1 the run is being resumed."""
    phase: str
    """Where the former holder was; '' for a new run."""
    parent_version: str | None
    """Set once the groups are claimed: train from exactly this one."""
    weights_version: str | None
    """Set once committed: do not train again, go on with its gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    run_id: str
    model_id: str
    trigger: str
    overrides: Mapping[str, object]
    state: str
    """requested | running | committed | promoted | rejected | skipped | failed"""
    phase: str
    reason: str
    owner: str | None
    fence: int
    parent_version: str | None
    weights_version: str | None
    num_claimed: int
    metrics: Mapping[str, object]
    requested_at: float
    started_at: float | None
    heartbeat_at: float | None
    finished_at: float | None


def run_lease(row: RunRow) -> RunLease:
    assert row.token is not None
    return RunLease(
        run_id=row.run_id,
        model_id=row.model_id,
        trigger=row.trigger,
        overrides=row.overrides,
        token=row.token,
        fence=row.fence,
        phase=row.phase,
        parent_version=row.parent_version,
        weights_version=row.weights_version,
    )


def run_view(row: RunRow) -> RunView:
    return RunView(
        run_id=row.run_id,
        model_id=row.model_id,
        trigger=row.trigger,
        overrides=row.overrides,
        state=row.state,
        phase=row.phase,
        reason=row.reason,
        owner=row.owner,
        fence=row.fence,
        parent_version=row.parent_version,
        weights_version=row.weights_version,
        num_claimed=row.num_claimed,
        metrics=row.metrics,
        requested_at=row.requested_at,
        started_at=row.started_at,
        heartbeat_at=row.heartbeat_at,
        finished_at=row.finished_at,
    )
