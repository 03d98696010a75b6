"""Integer expressions with + - * and parentheses, evaluated without eval."""

from __future__ import annotations

import ast
import re

_ALLOWED = re.compile(r"[0-9+\-*() ]{1,60}")


def evaluate(expression: str) -> int | None:
    """None for anything that is not such an expression."""
    if not _ALLOWED.fullmatch(expression) or "**" in expression:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return _value(tree.body)


def _value(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand)
        return None if inner is None else -inner
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    return left * right if isinstance(node.op, ast.Mult) else None
