"""Finds schemas that no finite value fits: `{"next": <itself>}` with `next` required.

A grammar of such a schema compiles, and a reply under it never ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from m1serve.errors import RequestError


def require_an_end(root: Mapping[str, object], targets: Mapping[str, object], where: str) -> None:
    """Raises RequestError when the root needs a schema that needs itself.

    `targets` are the schemas that `$ref`s point at, by pointer; other schemas are trees of them.
    """
    ending: set[str] = set()
    while fresh := {
        ref for ref, schema in targets.items() if ref not in ending and _ends(schema, ending)
    }:
        ending |= fresh
    if not _ends(root, ending):
        endless = sorted(set(targets) - ending)
        raise RequestError(
            f"{where} needs itself without end through {', '.join(endless[:3])}: no finite value "
            "fits; make a step of the circle optional or nullable",
            param=where,
            code="invalid_schema",
        )


def _ends(schema: object, ending: set[str]) -> bool:
    """Whether some finite value fits, as far as is known. Its depth was checked before."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and str(schema["$ref"]) not in ending:
        return False
    if not all(_ends(part, ending) for part in _list(schema.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _list(schema.get(key))
        if parts and not any(_ends(part, ending) for part in parts):
            return False
    kind = schema.get("type")
    if kind in ("object", ["object"]):
        named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        if isinstance(named, Mapping):
            needed = [named.get(name, other) for name in _list(schema.get("required"))]
            return all(_ends(part, ending) for part in needed)
    if kind in ("array", ["array"]):
        return _array_ends(schema, ending)
    return True


def _array_ends(schema: Mapping[str, object], ending: set[str]) -> bool:
    least, first = schema.get("minItems", 0), _list(schema.get("prefixItems"))
    if not isinstance(least, int | float):
        return True
    needed = first[: int(least)]
    if least > len(first) and "items" in schema:
        needed = [*needed, schema["items"]]
    return all(_ends(part, ending) for part in needed)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
