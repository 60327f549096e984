"""Objects that a strict schema closes, and those that stay open."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from toolkit.errors import InvalidParamError
from toolkit.sampling.json_schema import prepare
from toolkit.sampling.structured_outputs import StructuredOutputsParams

OPEN: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
CLOSED: dict[str, Any] = OPEN | {"additionalProperties": False}


def without_options(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {key: value for key, value in schema.items() if key != "x-guidance"}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, CLOSED),
        ({"patternProperties": {"^a": OPEN}, "type": "object"}, None),
        ({"properties": {"x": {"type": ["array", "null"], "items": OPEN}}}, None),
        ({"items": OPEN}, {"items": CLOSED}),
        ({"prefixItems": [OPEN, {}]}, {"prefixItems": [CLOSED, {}]}),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OPEN], "title": "A"}, {"allOf": [CLOSED], "title": "A"}),
        (
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": OPEN}},
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": CLOSED}},
        ),
    ],
)
def test_object_that_declares_properties_is_closed(schema, closed):
    if closed is None:
        text = json.dumps(schema)[:-1] + ', "additionalProperties": false}'
        closed = json.loads(text.replace(json.dumps(OPEN), json.dumps(CLOSED)))
    assert without_options(prepare(schema, lenient=False)) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        OPEN | {"anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
        {
            "properties": {"q": {}},
            "$ref": "#/$defs/x",
            "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}]}, "y": {"allOf": [OPEN]}},
        },
        {"const": OPEN},
        {"enum": [OPEN]},
        {"properties": 5, "required": True, "allOf": 3, "$ref": 7},
        {"$ref": "#/$defs/x/0", "allOf": [{}], "$defs": {"x": []}},
        [OPEN],
        True,
    ],
)
def test_object_that_others_complete_stays_open(schema):
    assert without_options(prepare(schema, lenient=False)) == schema


PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "a b+c": {"type": "boolean"}}
VALUES = {"name": "x", "age": 3, "a b+c": True, "more": None}


def allows(schema: Any, text: str, *, lenient: bool = False) -> bool:
    constraint = StructuredOutputsParams(json=schema, lenient=lenient)
    matcher = LLMatcher(LLTokenizer("byte"), constraint.to_grammar())
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and (
        matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda schema: schema,
        lambda schema: {"type": "array", "items": schema},
        lambda schema: {"$ref": "#/$defs/a", "$defs": {"a": schema}},
        lambda schema: {"anyOf": [{"type": "null"}, schema]},
    ],
)
def test_properties_of_open_objects_come_in_any_order(wrap, lenient):
    schema = wrap({"type": "object", "properties": PERSON, "additionalProperties": True})
    for count in range(5):
        for names in itertools.permutations(VALUES, count):
            text = json.dumps({name: VALUES[name] for name in names})
            text = f"[{text}]" if "items" in schema else text
            assert allows(schema, text, lenient=lenient), text


@pytest.mark.parametrize("required", [["name"], ["age"], ["a b+c"], ["age", "name"]])
def test_required_properties_come_first_or_as_declared(required):
    schema = {"type": "object", "properties": PERSON, "required": required}
    others = [name for name in VALUES if name not in required]
    first = [name for name in PERSON if name in required]
    for names in itertools.permutations(others):
        for order in ([*first, *names], list(VALUES)):
            text = json.dumps({name: VALUES[name] for name in order})
            assert allows(schema, text, lenient=True), text
        assert not allows(schema, json.dumps({name: VALUES[name] for name in names}), lenient=True)
    wrong = json.dumps({name: VALUES[name] for name in first} | {others[0]: [1]})
    assert not allows(schema, wrong, lenient=True)


def test_many_objects_keep_their_declared_order():
    person = {"type": "object", "properties": PERSON, "required": ["age"]}
    schema = {"type": "array", "prefixItems": [person] * 6, "items": person}
    text = json.dumps([{"name": "x", "age": 3}, {"age": 3, "a b+c": True}, {"age": 3, "z": 1}])
    assert allows(schema, text, lenient=True)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, '{"age": 1, "\\u0061ge": true}'),
        ({}, '{"\\u006eame": 1}'),
        ({"patternProperties": {"^n": {"type": "string"}}}, '{"\\u006e": 1}'),
    ],
)
def test_escapes_do_not_hide_declared_properties(more, text):
    schema = {"type": "object", "properties": PERSON, "additionalProperties": True, **more}
    assert not allows(schema, text)
    assert allows(schema, text.replace("\\u006e", "x").replace("\\u0061", "x"))


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"minProperties": 2}, True),
        ({"minProperties": 1}, False),
        ({"minProperties": 2, "required": ["a", "b"]}, False),
        ({"minProperties": 2, "properties": PERSON, "additionalProperties": True}, True),
        ({"minProperties": 2, "patternProperties": {"^a": {}}}, True),
        ({"properties": {"a": {"minProperties": 2}}}, True),
    ],
)
def test_minimum_of_properties_that_may_repeat_is_refused(schema, is_refused):
    schema = {"type": "object", **schema}
    StructuredOutputsParams(json=schema, lenient=True).to_grammar()
    constraint = StructuredOutputsParams(json=schema)
    if is_refused:
        with pytest.raises(InvalidParamError, match="minProperties 2"):
            constraint.to_grammar()
    else:
        constraint.to_grammar()
