"""Client schemas: what may become a grammar, what is refused and which place is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1serve.chat.grammar import CallableTool, calls_grammar, json_grammar
from m1serve.chat.json_schema import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_PROPERTIES,
    MAX_REF_TARGETS,
    MAX_SCHEMA_BYTES,
    check_schema,
)
from m1serve.errors import RequestError

TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "next", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


FINE: dict[str, dict[str, Any]] = {
    "anything": {},
    "a tree that ends": TREE,
    "annotations": {"title": "t", "description": "d", "default": 1, "examples": [2], "$id": "x"},
    "data that looks like a schema": {"enum": [{"not": 1, "$ref": "http://x"}, None]},
    "a property named as a keyword": {"properties": {"not": {"type": "string"}, "$ref": {}}},
    "as deep as may be": nested(MAX_DEPTH - 2),
    "a fraction": {"multipleOf": 0.01, "minimum": -1.5},
    "true and false": {"properties": {"a": True, "b": False}, "additionalProperties": False},
    "an escaped pointer": {"$defs": {"a/b": {}}, "$ref": "#/$defs/a~1b"},
    "a list that may be empty": {"type": "array", "items": {"$ref": "#"}},
    "an object that need not go on": {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": [],
    },
}


@pytest.mark.parametrize("schema", FINE.values(), ids=FINE)
def test_a_schema_within_the_limits_passes(schema: dict[str, Any]) -> None:
    check_schema(schema, "s")


def many(number: int) -> dict[str, Any]:
    return {f"p{i}": {} for i in range(number)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (nested(MAX_DEPTH), "s"),
    "many values": ({"enum": [1] * MAX_NODES}, "s"),
    "many bytes": ({"const": "x" * MAX_SCHEMA_BYTES}, "s"),
    "many properties": ({"properties": many(MAX_PROPERTIES + 1)}, "s.properties"),
    "many references": (
        {
            "$defs": many(MAX_REF_TARGETS + 1),
            "anyOf": [{"$ref": f"#/$defs/p{i}"} for i in range(MAX_REF_TARGETS + 1)],
        },
        "s",
    ),
    "a branch": ({"anyOf": [{}, {"if": {}}]}, "s.anyOf[1].if"),
    "unique items": ({"properties": {"a": {"uniqueItems": True}}}, "s.properties.a.uniqueItems"),
    "no schema": ({"items": [{}]}, "s.items"),
    "no list": ({"anyOf": {}}, "s.anyOf"),
    "no object": ({"properties": []}, "s.properties"),
    "no names": ({"required": [1]}, "s.required"),
    "no number": ({"minimum": "a"}, "s.minimum"),
    "no count": ({"maxLength": 1.5}, "s.maxLength"),
    "a huge count": ({"maxItems": 10**9}, "s.maxItems"),
    "a bool as a count": ({"maxItems": True}, "s.maxItems"),
    "a long pattern": ({"pattern": "a" * 600}, "s.pattern"),
    "a long key pattern": ({"patternProperties": {"a" * 600: {}}}, "s.pattern"),
    "a pattern that is none": ({"pattern": 3}, "s.pattern"),
    "a fine divisor": ({"multipleOf": 1e-13}, "s.multipleOf"),
    "many digits": ({"multipleOf": 1.23456}, "s.multipleOf"),
    "nothing as a divisor": ({"multipleOf": 0}, "s.multipleOf"),
    "not a number": ({"minimum": float("nan")}, "s"),
    "an infinity in data": ({"const": [float("inf")]}, "s"),
    "remote": ({"$ref": "other.json#/a"}, "s.$ref"),
    "a name": ({"$ref": "#anchor"}, "s.$ref"),
    "no pointer": ({"$ref": 3}, "s.$ref"),
    "a pointer to data": ({"const": 1, "$ref": "#/const"}, "s.$ref"),
    "itself": ({"$ref": "#"}, "s"),
    "each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "s",
    ),
    "every branch goes on": ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, {}]}]}, "s"),
    "a needed item": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "s"),
    "a needed place": ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "s"),
    "a needed member": (
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        "s",
    ),
}


@pytest.mark.parametrize(("schema", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_names_its_place(schema: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_schema(schema, "s")
    assert caught.value.param == param
    assert caught.value.status == 400
    assert str(caught.value).startswith(param)


KEYS = "type properties items anyOf $ref required minItems multipleOf pattern enum prefixItems"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS.split(), "a"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(KEYS.split()), JSON))
def test_any_json_is_passed_or_refused_and_nothing_else(schema: dict[str, Any]) -> None:
    param = "s"
    try:
        check_schema(schema, "s")
    except RequestError as error:
        param = error.param or ""
    assert param.startswith("s")


def test_a_name_with_quotes_stays_one_literal() -> None:
    tools = [CallableTool(name='a "b"\n', schema=None)]
    text = calls_grammar(tools, max_calls=1)
    assert r'"{\"name\": \"a \\\"b\\\"\\n\", \"arguments\": "' in text
    assert len(text.splitlines()) == 7


def test_a_schema_takes_one_line_whatever_it_holds() -> None:
    text = json_grammar({"const": 'a\n"%json', "description": "\u2028"})
    assert len(text.splitlines()) == 4
