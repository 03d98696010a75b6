"""Results of a version on held-out suites, kept for gates and for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select

from m1serve.store.database import Database
from m1serve.store.work_tables import EvalRow


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    weights_version: str
    suite: str
    family: str
    num: int
    successes: int
    details: Mapping[str, object]
    created_at: float


class Evals:
    def __init__(self, db: Database) -> None:
        self._db = db

    def record(
        self,
        weights_version: str,
        suite: str,
        family: str,
        num: int,
        successes: int,
        details: Mapping[str, object] | None = None,
    ) -> None:
        with self._db.write() as session:
            session.add(
                EvalRow(
                    weights_version=weights_version,
                    suite=suite,
                    family=family,
                    num=num,
                    successes=successes,
                    details=dict(details or {}),
                    created_at=time.time(),
                )
            )

    def list(self, weights_version: str | None = None, *, limit: int = 1000) -> list[EvalResult]:
        """Newest first."""
        query = select(EvalRow).order_by(EvalRow.eval_id.desc()).limit(limit)
        if weights_version is not None:
            query = query.where(EvalRow.weights_version == weights_version)
        with self._db.read() as session:
            return [
                EvalResult(
                    weights_version=row.weights_version,
                    suite=row.suite,
                    family=row.family,
                    num=row.num,
                    successes=row.successes,
                    details=row.details,
                    created_at=row.created_at,
                )
                for row in session.scalars(query)
            ]
