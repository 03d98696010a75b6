"""Weight versions, what should serve (targets) and what does (deployments)."""

from __future__ import annotations

import builtins
import time

from sqlalchemy import func, select

from m1serve.errors import StoreError
from m1serve.store.database import Database
from m1serve.store.deployments import Deployment, list_deployments, save_deployment
from m1serve.store.pruning import prunable_versions
from m1serve.store.versions import (
    WeightsVersion,
    as_version,
    known_version,
    move_state,
    move_target,
    weights_row,
)
from m1serve.store.work_tables import TargetRow, WeightsRow
from m1serve.types import Slot, SwapReport, VersionRef, VersionState

ANY = "*"
"""For `set_target(expect=...)`: whatever is there now."""


class Weights:
    def __init__(self, db: Database) -> None:
        self._db = db

    def register(
        self,
        weights_version: str,
        model_id: str,
        path: str,
        *,
        parent: str | None = None,
        run_id: str | None = None,
        state: VersionState = VersionState.CANDIDATE,
        manifest_digest: str = "",
    ) -> bool:
        """Adds a version that no run committed (an imported one). False when known already."""
        if weights_version.rpartition("@")[0] != model_id:
            raise StoreError(
                f"weights version {weights_version!r} is not a version of {model_id!r}"
            )
        row = weights_row(
            weights_version=weights_version,
            path=path,
            parent=parent,
            run_id=run_id,
            state=state,
            manifest_digest=manifest_digest,
            reason="registered",
            now=time.time(),
        )
        with self._db.write(lock=f"weights:{model_id}") as session:
            if session.get(WeightsRow, weights_version) is not None:
                return False
            session.add(row)
            return True

    def advance(
        self,
        weights_version: str,
        from_state: VersionState,
        to_state: VersionState,
        reason: str,
        *,
        actor: str = "trainer",
    ) -> bool:
        with self._db.write() as session:
            return move_state(session, weights_version, (from_state, to_state), reason, actor)

    def get(self, weights_version: str) -> WeightsVersion | None:
        with self._db.read() as session:
            row = session.get(WeightsRow, weights_version)
            return as_version(row) if row is not None else None

    def list(self, model_id: str | None = None) -> list[WeightsVersion]:
        """Newest first."""
        query = select(WeightsRow).order_by(WeightsRow.model_id, WeightsRow.number.desc())
        if model_id is not None:
            query = query.where(WeightsRow.model_id == model_id)
        with self._db.read() as session:
            return [as_version(row) for row in session.scalars(query)]

    def prunable(self, model_id: str, keep: int) -> builtins.list[WeightsVersion]:
        """Whose files nobody needs: see `prunable_versions`."""
        with self._db.read() as session:
            return prunable_versions(session, model_id, keep)

    def next_number(self, model_id: str) -> int:
        query = select(func.max(WeightsRow.number)).where(WeightsRow.model_id == model_id)
        with self._db.read() as session:
            newest = session.execute(query).scalar_one()
        return 0 if newest is None else newest + 1

    def target(self, model_id: str, slot: Slot = Slot.STABLE) -> VersionRef | None:
        query = (
            select(WeightsRow.weights_version, WeightsRow.path)
            .join(TargetRow, TargetRow.weights_version == WeightsRow.weights_version)
            .where(TargetRow.model_id == model_id, TargetRow.slot == slot.value)
        )
        with self._db.read() as session:
            row = session.execute(query).one_or_none()
        return None if row is None else VersionRef(weights_version=row[0], path=row[1])

    def set_target(
        self,
        model_id: str,
        slot: Slot,
        weights_version: str | None,
        *,
        expect: str | None = ANY,
        reason: str = "set",
    ) -> bool:
        """Compare-and-set of a slot; `expect` names what must be there (None: nothing). None clears
        it.
        """
        with self._db.write(lock=f"weights:{model_id}") as session:
            row = session.get(TargetRow, (model_id, slot.value))
            found = row.weights_version if row is not None else None
            if expect != ANY and found != expect:
                return False
            if weights_version is not None:
                known_version(session, weights_version, model_id)
            if found != weights_version:
                move_target(session, model_id, slot, weights_version, reason)
            return True

    def promote(self, weights_version: str, *, reason: str = "gates passed") -> None:
        """Gated or canary becomes active and the stable target, its parent retires: one
        transaction.

        Refused with StoreError when the stable target is not the parent any more (somebody rolled
        back or promoted meanwhile). Promoting what is active already does nothing.
        """
        model_id = weights_version.rpartition("@")[0]
        with self._db.write(lock=f"weights:{model_id}") as session:
            row = known_version(session, weights_version)
            target = session.get(TargetRow, (model_id, Slot.STABLE.value))
            stable = target.weights_version if target is not None else None
            if row.state == VersionState.ACTIVE and stable == weights_version:
                return
            if row.parent is not None and stable != row.parent:
                raise StoreError(
                    f"cannot promote {weights_version}: it was trained from {row.parent} but "
                    f"{stable} is stable by now; reject it and train again"
                )
            if stable is not None:
                arrow = (VersionState.ACTIVE, VersionState.RETIRED)
                move_state(session, stable, arrow, f"replaced by {weights_version}", "store")
            before = VersionState(row.state)
            if not move_state(
                session, weights_version, (before, VersionState.ACTIVE), reason, "store"
            ):
                raise StoreError(f"cannot promote {weights_version}: it left {before} meanwhile")
            move_target(session, model_id, Slot.STABLE, weights_version, reason)
            canary = session.get(TargetRow, (model_id, Slot.CANARY.value))
            if canary is not None and canary.weights_version == weights_version:
                move_target(session, model_id, Slot.CANARY, None, "promoted")

    def rollback(self, model_id: str, *, reason: str = "rolled back by hand") -> str:
        """Back to the nearest retired ancestor of what is stable; returns its weights_version."""
        with self._db.write(lock=f"weights:{model_id}") as session:
            target = session.get(TargetRow, (model_id, Slot.STABLE.value))
            if target is None:
                raise StoreError(f"cannot roll back {model_id!r}: it has no stable target")
            current = known_version(session, target.weights_version)
            ancestor = current
            while ancestor.parent is not None:
                ancestor = known_version(session, ancestor.parent)
                if ancestor.state == VersionState.RETIRED:
                    break
            else:
                raise StoreError(
                    f"cannot roll back {current.weights_version}: no retired ancestor to go to"
                )
            version = ancestor.weights_version
            away = (VersionState.ACTIVE, VersionState.ROLLED_BACK)
            move_state(session, current.weights_version, away, reason, "store")
            back = (VersionState.RETIRED, VersionState.ACTIVE)
            move_state(session, version, back, f"instead of {current.weights_version}", "store")
            move_target(session, model_id, Slot.STABLE, version, reason)
            return version

    def report_deployment(
        self, replica: str, slot: Slot, weights_version: str, report: SwapReport
    ) -> None:
        """What a replica did when asked to load `weights_version`."""
        with self._db.write() as session:
            save_deployment(session, replica, slot, weights_version, report)

    def deployments(self, model_id: str | None = None) -> builtins.list[Deployment]:
        with self._db.read() as session:
            return list_deployments(session, model_id)
