"""Which versions' files nobody needs any more. Their rows stay."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from m1serve.store.versions import WeightsVersion, as_version
from m1serve.store.work_tables import DeploymentRow, RunRow, TargetRow, WeightsRow
from m1serve.types import VersionState


def prunable_versions(session: Session, model_id: str, keep: int) -> list[WeightsVersion]:
    """Retired ones but the `keep` newest, and rejected ones; newest first.

    Never what is targeted, deployed, part of an unfinished run or imported: the first version
    lends its tokenizer to every start.
    """
    query = (
        select(WeightsRow)
        .where(
            WeightsRow.model_id == model_id,
            WeightsRow.state.in_([VersionState.RETIRED.value, VersionState.REJECTED.value]),
        )
        .order_by(WeightsRow.number.desc())
    )
    versions = [as_version(row) for row in session.scalars(query)]
    retired = [v for v in versions if v.state is VersionState.RETIRED]
    kept = {v.weights_version for v in retired[:keep]} | _in_use(session, model_id)
    return [v for v in versions if v.parent is not None and v.weights_version not in kept]


def _in_use(session: Session, model_id: str) -> set[str | None]:
    is_unfinished = (RunRow.model_id == model_id) & RunRow.finished_at.is_(None)
    queries = (
        select(TargetRow.weights_version).where(TargetRow.model_id == model_id),
        select(DeploymentRow.weights_version).where(DeploymentRow.model_id == model_id),
        select(DeploymentRow.wanted_version).where(DeploymentRow.model_id == model_id),
        select(RunRow.parent_version).where(is_unfinished),
        select(RunRow.weights_version).where(is_unfinished),
    )
    return {name for query in queries for name in session.scalars(query)}
