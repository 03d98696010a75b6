"""Training runs: fenced leases over run rows, so that a crashed run resumes and a lost one cannot
commit.
"""

from __future__ import annotations

import builtins
import time
import uuid
from collections.abc import Mapping
from typing import Literal

from sqlalchemy import Select, and_, or_, select
from sqlalchemy.orm import Session, aliased

from m1serve.errors import FencedError, StoreError
from m1serve.store.claims import claim_set, commit_claims, release_claims, release_committed
from m1serve.store.database import Database
from m1serve.store.failures import count_failure
from m1serve.store.run_views import RunLease, RunView, run_lease, run_view
from m1serve.store.versions import move_state, weights_row
from m1serve.store.views import TrajectoryView, load_trajectories
from m1serve.store.work_tables import RunRow, WeightsRow
from m1serve.types import VersionState

LIVE = ("running", "committed")
UNDECIDED = frozenset(
    {VersionState.CANDIDATE, VersionState.VERIFIED, VersionState.GATED, VersionState.CANARY}
)
"""A run that is given up takes a version in one of these with it."""
Outcome = Literal["promoted", "rejected", "skipped", "failed"]


class Runs:
    def __init__(self, db: Database) -> None:
        self._db = db

    def request(
        self, model_id: str, trigger: str, overrides: Mapping[str, object] | None = None
    ) -> str:
        """Asks for a run; an equal request that nobody began is answered with its id."""
        wanted = dict(overrides or {})
        waiting = select(RunRow).where(
            RunRow.model_id == model_id, RunRow.trigger == trigger, RunRow.state == "requested"
        )
        with self._db.write(lock=f"runs:{model_id}") as session:
            for row in session.scalars(waiting):
                if row.overrides == wanted:
                    return row.run_id
            row = _requested(model_id, trigger, wanted)
            session.add(row)
            return row.run_id

    def claim_next(
        self,
        owner: str,
        lease_s: float,
        *,
        model_id: str | None = None,
        max_attempts: int = 5,
        now: float | None = None,
    ) -> RunLease | None:
        """The oldest run to work on: one whose lease ran out before a new one; one at a time a
        model.

        A run that lost its lease `max_attempts` times is failed on the way.
        """
        at = _clock(now)
        with self._db.write(lock="runs") as session:
            for row in session.scalars(_claimable(at, model_id)):
                if row.fence >= max_attempts:
                    _give_up(session, row, at)
                    continue
                row.token, row.fence = uuid.uuid4().hex, row.fence + 1
                row.owner, row.lease_s, row.lease_until = owner, lease_s, at + lease_s
                row.heartbeat_at = at
                row.started_at = row.started_at or at
                row.state = "running" if row.state == "requested" else row.state
                return run_lease(row)
        return None

    def heartbeat(self, run_id: str, token: str, *, now: float | None = None) -> None:
        """Extends the lease; FencedError when somebody else took the run over."""
        at = _clock(now)
        with self._db.write() as session:
            row = _held(session, run_id, token)
            row.lease_until, row.heartbeat_at = at + row.lease_s, at

    def set_phase(self, run_id: str, token: str, phase: str) -> None:
        with self._db.write() as session:
            _held(session, run_id, token).phase = phase

    def claim_groups(
        self,
        run_id: str,
        token: str,
        *,
        model_id: str,
        parent_version: str,
        max_groups: int,
        max_age_versions: int,
    ) -> builtins.list[TrajectoryView]:
        """Freezes the run's training set at its first call; every later one returns the same set.

        Only mode train, rewarded, not older than `max_age_versions`; a group is taken whole, and
        only when all its sessions are closed and all its members are judged.
        """
        with self._db.write(lock=f"claim:{model_id}") as session:
            row = _held(session, run_id, token)
            if row.claimed_at is None:
                row.parent_version, row.claimed_at = parent_version, time.time()
                row.num_claimed = claim_set(
                    session, row, max_groups=max_groups, max_age_versions=max_age_versions
                )
            elif row.parent_version != parent_version:
                raise StoreError(
                    f"run {run_id} was claimed for parent {row.parent_version}, got "
                    f"{parent_version}; a resumed run keeps its parent"
                )
        with self._db.read() as session:
            return load_trajectories(session, claimed_by=run_id)

    def commit(
        self,
        run_id: str,
        token: str,
        *,
        weights_version: str,
        parent: str | None,
        path: str,
        manifest_digest: str,
        metrics: Mapping[str, object],
    ) -> None:
        """One transaction: the data is consumed, the version is a candidate, the run is committed.

        Repeating it for the same version does nothing. FencedError when the lease is lost.
        """
        with self._db.write() as session:
            row = _held(session, run_id, token)
            if row.state == "committed" and row.weights_version == weights_version:
                return
            if row.state != "running" or row.claimed_at is None:
                raise StoreError(
                    f"run {run_id} is {row.state} with version {row.weights_version}; "
                    f"cannot commit {weights_version}: claim its groups first, commit once"
                )
            now = time.time()
            commit_claims(session, row, now)
            row.state, row.weights_version = "committed", weights_version
            row.metrics = {**row.metrics, **metrics}
            session.add(
                weights_row(
                    weights_version=weights_version,
                    path=path,
                    parent=parent,
                    run_id=run_id,
                    state=VersionState.CANDIDATE,
                    manifest_digest=manifest_digest,
                    reason=f"run {run_id}",
                    now=now,
                )
            )

    def finish(
        self,
        run_id: str,
        token: str,
        outcome: Outcome,
        reason: str,
        metrics: Mapping[str, object] | None = None,
    ) -> None:
        """Ends the run. What it claimed and never committed becomes eligible again, unless released
        before; what a second run failed with is burned.
        """
        with self._db.write() as session:
            row = _held(session, run_id, token)
            if outcome == "promoted" and row.state != "committed":
                raise StoreError(f"run {run_id} is {row.state}; only a committed run is promoted")
            if outcome == "failed":
                count_failure(session, run_id, reason)
            release_claims(session, run_id, "eligible", f"run {run_id} {outcome}")
            row.metrics = {**row.metrics, **(metrics or {})}
            _end(row, outcome, reason, time.time())

    def release(self, run_id: str, token: str, how: Literal["release", "burn"]) -> int:
        """Gives the run's trajectories back for other runs, or burns them; returns how many.

        After a commit this is for rejected versions only; it frees or keeps the trained-once mark.
        """
        with self._db.write() as session:
            row = _held(session, run_id, token)
            if row.state == "committed":
                version = session.get_one(WeightsRow, row.weights_version)
                if version.state not in (VersionState.REJECTED, VersionState.ROLLED_BACK):
                    raise StoreError(
                        f"run {run_id}: {row.weights_version} is {version.state}; only data of a "
                        "rejected version can be released or burned"
                    )
                return release_committed(session, run_id, how)
            if how == "release":
                return release_claims(session, run_id, "eligible", f"run {run_id} gave it back")
            return release_claims(session, run_id, "burned", f"run {run_id} burned it")

    def get(self, run_id: str) -> RunView | None:
        with self._db.read() as session:
            row = session.get(RunRow, run_id)
            return run_view(row) if row is not None else None

    def list(self, model_id: str | None = None, *, limit: int = 100) -> builtins.list[RunView]:
        """Newest first."""
        query = select(RunRow).order_by(RunRow.requested_at.desc(), RunRow.run_id).limit(limit)
        if model_id is not None:
            query = query.where(RunRow.model_id == model_id)
        with self._db.read() as session:
            return [run_view(row) for row in session.scalars(query)]


def _claimable(at: float, model_id: str | None) -> Select[RunRow]:
    other = aliased(RunRow)
    is_model_busy = (
        select(other.run_id)
        .where(other.model_id == RunRow.model_id, other.state.in_(LIVE))
        .exists()
    )
    is_lost = and_(RunRow.state.in_(LIVE), RunRow.lease_until < at)
    is_new = and_(RunRow.state == "requested", ~is_model_busy)
    query = (
        select(RunRow)
        .where(or_(is_lost, is_new))
        .order_by(RunRow.state == "requested", RunRow.requested_at, RunRow.run_id)
        .with_for_update()
    )
    return query if model_id is None else query.where(RunRow.model_id == model_id)


def _held(session: Session, run_id: str, token: str) -> RunRow:
    row = session.get(RunRow, run_id, with_for_update=True)
    if row is None:
        raise StoreError(f"no run {run_id!r}")
    if row.state not in LIVE or row.token != token:
        raise FencedError(
            f"run {run_id} is {row.state}, claimed last by {row.owner!r} (claim {row.fence}), "
            "not held by this token; stop and write nothing"
        )
    return row


def _give_up(session: Session, row: RunRow, at: float) -> None:
    reason = f"lost its lease {row.fence} times in phase {row.phase!r}"
    count_failure(session, row.run_id, f"run {row.run_id} {reason}")
    release_claims(session, row.run_id, "eligible", f"run {row.run_id} failed")
    outcome: Outcome = "failed"
    if row.weights_version is not None:
        version = session.get_one(WeightsRow, row.weights_version)
        state = VersionState(version.state)
        if state in UNDECIDED:
            arrow = (state, VersionState.REJECTED)
            move_state(session, row.weights_version, arrow, f"run {row.run_id} {reason}", "store")
        else:
            outcome = "rejected" if state is VersionState.REJECTED else "promoted"
    _end(row, outcome, reason, at)


def _end(row: RunRow, outcome: Outcome, reason: str, at: float) -> None:
    row.state, row.reason, row.finished_at = outcome, reason, at
    row.token, row.lease_until = None, None


def _requested(model_id: str, trigger: str, overrides: dict[str, object]) -> RunRow:
    return RunRow(
        run_id=uuid.uuid4().hex,
        model_id=model_id,
        trigger=trigger,
        overrides=overrides,
        state="requested",
        phase="",
        reason="",
        fence=0,
        lease_s=0.0,
        num_claimed=0,
        metrics={},
        requested_at=time.time(),
    )


def _clock(now: float | None) -> float:
    return time.time() if now is None else now
