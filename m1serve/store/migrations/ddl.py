"""Shorthands for migrations; they must go on meaning what they mean."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op


def columns(
    kind: sa.types.TypeEngine[Any], *names: str, nullable: bool = False
) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def partial_unique(name: str, table: str, over: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(
        name, table, over, unique=True, sqlite_where=condition, postgresql_where=condition
    )
