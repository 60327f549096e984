"""Objects that a strict schema closes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolkit.sampling.json_schema import close_objects

OPEN: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
CLOSED: dict[str, Any] = OPEN | {"additionalProperties": False}


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
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": {"type": "string"}},
        OPEN | {"required": ["b"]},
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
    assert close_objects(schema) == schema
