"""Who changed what, and why: one row in the same transaction as the change."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from m1serve.store.database import Database
from m1serve.store.work_tables import AuditRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    at: float
    actor: str
    action: str
    subject: str
    before: str | None
    after: str | None
    reason: str


def write_audit(session: Session, entry: AuditEntry) -> None:
    session.add(
        AuditRow(
            at=entry.at,
            actor=entry.actor,
            action=entry.action,
            subject=entry.subject,
            before=entry.before,
            after=entry.after,
            reason=entry.reason,
        )
    )


class Audit:
    def __init__(self, db: Database) -> None:
        self._db = db

    def record(
        self,
        *,
        actor: str,
        action: str,
        subject: str,
        before: str | None = None,
        after: str | None = None,
        reason: str = "",
    ) -> None:
        with self._db.write() as session:
            write_audit(
                session,
                AuditEntry(
                    at=time.time(),
                    actor=actor,
                    action=action,
                    subject=subject,
                    before=before,
                    after=after,
                    reason=reason,
                ),
            )

    def list(self, *, subject: str | None = None, limit: int = 100) -> list[AuditEntry]:
        """Newest first."""
        query = select(AuditRow).order_by(AuditRow.audit_id.desc()).limit(limit)
        if subject is not None:
            query = query.where(AuditRow.subject == subject)
        with self._db.read() as session:
            return [
                AuditEntry(
                    at=row.at,
                    actor=row.actor,
                    action=row.action,
                    subject=row.subject,
                    before=row.before,
                    after=row.after,
                    reason=row.reason,
                )
                for row in session.scalars(query)
            ]
