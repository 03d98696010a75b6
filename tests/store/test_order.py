"""Rows with one time come in one order on every database: each sort ends in a unique column."""

import ast
from pathlib import Path

import pytest
from sqlalchemy import UniqueConstraint

from m1serve.store import tables
from m1serve.store.tables import Base

_STORE = Path(tables.__file__).parent


def _unique_columns() -> set[str]:
    """Those of a primary key or a unique constraint: `Row.column`, for an alias `column` alone."""
    names = set()
    for mapper in Base.registry.mappers:
        table = mapper.local_table
        unique = [*table.primary_key.columns]
        for constraint in table.constraints:
            if isinstance(constraint, UniqueConstraint):
                unique += constraint.columns
        unique += [column for index in table.indexes if index.unique for column in index.columns]
        for column in unique:
            names |= {f"{mapper.class_.__name__}.{column.name}", column.name}
    return names


def _sorts(path: Path) -> list[tuple[int, list[ast.expr]]]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [
        (node.lineno, node.args)
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "order_by"
    ]


def _last_column(arguments: list[ast.expr]) -> str:
    name = ast.unparse(arguments[-1]).removesuffix(".desc()")
    is_alias = name[:1].islower()
    return name.rpartition(".")[2] if is_alias else name


@pytest.mark.parametrize("path", sorted(_STORE.glob("*.py")), ids=lambda path: path.stem)
def test_every_sort_ends_in_a_unique_column(path: Path) -> None:
    unique = _unique_columns()
    for line, arguments in _sorts(path):
        assert _last_column(arguments) in unique, f"{path.name}:{line} has ties"


def test_the_rule_finds_a_sort_with_ties(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text("query.order_by(FeedbackRow.at)\nquery.order_by(RunRow.run_id.desc())\n")
    unique = _unique_columns()
    sorts = [_last_column(arguments) in unique for _, arguments in _sorts(source)]
    assert sorts == [False, True]
