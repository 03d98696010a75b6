"""Checks a client's JSON schema before it may become a grammar: limits, keywords, references.

What is refused here would stall, crash or silently weaken the compiler; the error names the place.
What only the compiler can tell (regular expressions, unsatisfiable unions) it says itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from m1serve.chat.schema_recursion import require_an_end
from m1serve.errors import RequestError

MAX_SCHEMA_BYTES = 128 * 1024
MAX_DEPTH = 60
"""Of nested JSON values. The compiler's own reader gives up at 128."""
MAX_NODES = 10_000
MAX_REF_TARGETS = 100
MAX_EXPANDED_DEPTH = 1500
"""Nested values once references are followed: the compiler recurses that deep on its stack."""
MAX_PROPERTIES = 1000
MAX_PATTERN_CHARS = 512
MAX_COUNT = 1_000_000
MAX_MULTIPLE = 10_000
"""Divisibility is an automaton with as many states as the divisor."""

_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"uniqueItems", "contains", "minContains", "maxContains", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "x-guidance"}
)
_ONE, _MANY = ("additionalProperties", "items", "additionalItems"), ("anyOf", "allOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class _Node:
    """A schema inside the schema."""

    schema: Mapping[str, object]
    where: str


def check_schema(schema: Mapping[str, object], where: str) -> None:
    """Raises RequestError with the path of what cannot be kept; `where` begins that path."""
    expanded = _check_json(schema, where)
    nodes = list(_walk(schema, where))
    targets: dict[str, object] = {}
    for node in nodes:
        _check_node(node)
        ref = node.schema.get("$ref")
        if ref is not None:
            targets[str(ref)] = _target(schema, ref, f"{node.where}.$ref")
    if len(targets) > MAX_REF_TARGETS:
        raise _refusal(
            where, f"has {len(targets)} referenced schemas", f"at most {MAX_REF_TARGETS}"
        )
    expanded += sum(_depth(target) for target in targets.values())
    if expanded > MAX_EXPANDED_DEPTH:
        raise _refusal(
            where,
            f"is nested {expanded} deep once its references are followed",
            f"at most {MAX_EXPANDED_DEPTH}",
        )
    if targets:
        require_an_end(schema, targets, where)


def _check_json(schema: Mapping[str, object], where: str) -> int:
    """Size, depth and numbers of the whole value; returns its depth."""
    deepest, num_nodes = 0, 0
    level: list[object] = [schema]
    while level:
        deepest, num_nodes = deepest + 1, num_nodes + len(level)
        if deepest > MAX_DEPTH:
            raise _refusal(where, f"is nested more than {MAX_DEPTH} deep", "a flatter schema")
        if num_nodes > MAX_NODES:
            raise _refusal(where, f"has more than {MAX_NODES} values", "a smaller schema")
        for value in level:
            # NaN compares false, and an int may be too large for a float
            if type(value) in (int, float) and not -(2**63) < value < 2**63:  # type: ignore[operator]
                raise _refusal(where, "has a number out of range", "finite ones below 2**63")
        level = [child for value in level for child in _children(value)]
    num_bytes = len(json.dumps(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _refusal(where, f"has {num_bytes} bytes", f"at most {MAX_SCHEMA_BYTES}")
    return deepest


def _depth(value: object) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [child for parent in level for child in _children(parent)]
    return deepest


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _walk(schema: Mapping[str, object], where: str) -> Iterator[_Node]:
    """Every schema in it; `true` and `false` are none."""
    stack: list[tuple[object, str]] = [(schema, where)]
    while stack:
        value, path = stack.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, Mapping):
            raise _refusal(path, f"is {_kind(value)}", "a schema: an object or a boolean")
        yield _Node(value, path)
        stack += [(value[key], f"{path}.{key}") for key in _ONE if key in value]
        for key in (*_MANY, "prefixItems"):
            listed = value.get(key, [])
            if not isinstance(listed, list):
                raise _refusal(f"{path}.{key}", f"is {_kind(listed)}", "a list of schemas")
            stack += [(item, f"{path}.{key}[{n}]") for n, item in enumerate(listed)]
        for key in _NAMED:
            named = value.get(key, {})
            if not isinstance(named, Mapping):
                raise _refusal(f"{path}.{key}", f"is {_kind(named)}", "an object of schemas")
            stack += [(item, f"{path}.{key}.{name}") for name, item in named.items()]


def _check_node(node: _Node) -> None:
    schema, where = node.schema, node.where
    for key in schema:
        if key in _UNSUPPORTED:
            raise _refusal(f"{where}.{key}", "cannot be enforced", "a schema without it")
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
        raise _refusal(
            f"{where}.properties", f"has {len(properties)} entries", f"at most {MAX_PROPERTIES}"
        )
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise _refusal(f"{where}.required", f"is {_shown(required)}", "a list of names")
    for key in _COUNTS:
        value = schema.get(key, 0)
        if not (type(value) in (int, float) and 0 <= value <= MAX_COUNT and value == int(value)):  # type: ignore[operator, call-overload]
            raise _refusal(f"{where}.{key}", f"is {_shown(value)}", f"0 to {MAX_COUNT}")
    for key in _BOUNDS:
        if type(schema.get(key, 0)) not in (int, float):
            raise _refusal(f"{where}.{key}", f"is {_shown(schema[key])}", "a number")
    _check_multiple(schema.get("multipleOf", 1), f"{where}.multipleOf")
    patterns = schema.get("patternProperties", {})
    for pattern in (
        schema.get("pattern", ""),
        *(patterns if isinstance(patterns, Mapping) else ()),
    ):
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
            raise _refusal(
                f"{where}.pattern", f"is {_shown(pattern)}", f"up to {MAX_PATTERN_CHARS} characters"
            )


def _check_multiple(value: object, where: str) -> None:
    is_fine = type(value) in (int, float) and value > 0  # type: ignore[operator]
    if is_fine:
        digits = Decimal(str(value)).normalize().as_tuple()
        size = int("".join(map(str, digits.digits))) * 10 ** max(0, int(digits.exponent))
        is_fine = size <= MAX_MULTIPLE and int(digits.exponent) >= -12
    if not is_fine:
        raise _refusal(where, f"is {_shown(value)}", f"a number of up to {MAX_MULTIPLE} units")


def _target(root: Mapping[str, object], ref: object, where: str) -> object:
    """What a reference points at, inside this schema."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise _refusal(where, f"is {_shown(ref)}", "a pointer into this schema, '#/$defs/...'")
    value: object = root
    for part in ref.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise _refusal(where, f"is {_shown(ref)}, which is not there", "an existing pointer")
    if not isinstance(value, Mapping | bool):
        raise _refusal(where, f"is {_shown(ref)}, which is no schema", "the pointer of a schema")
    return value


def _refusal(where: str, what: str, wanted: str) -> RequestError:
    place = where if len(where) <= 200 else f"{where[:120]}...{where[-60:]}"
    return RequestError(f"{place} {what}; wanted {wanted}", param=place, code="invalid_schema")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
