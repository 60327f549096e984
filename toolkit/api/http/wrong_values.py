"""Describe wrong values in request bodies, in the API's words instead of pydantic's."""

from __future__ import annotations

import json
from typing import Any

MAX_SHOWN = 40  # characters of a value

_KINDS = {
    "a string": ("string_type", "string_unicode"),
    "an integer": ("int_type", "int_parsing", "int_from_float"),
    "an integer of at most 64 bits": ("int_parsing_size",),
    "a number": ("float_type", "float_parsing"),
    "a finite number": ("finite_number",),
    "true or false": ("bool_type", "bool_parsing"),
    "a list": ("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"),
    "an object": ("dict_type", "mapping_type", "model_type", "model_attributes_type"),
    "null": ("none_required",),
    "one of {expected}": ("literal_error", "enum"),
    "one of {expected_tags}": ("union_tag_invalid",),
    "greater than {gt}": ("greater_than",),
    "at least {ge}": ("greater_than_equal",),
    "less than {lt}": ("less_than",),
    "at most {le}": ("less_than_equal",),
    "a multiple of {multiple_of}": ("multiple_of",),
    "a string of at least {min_length} characters": ("string_too_short",),
    "a string of at most {max_length} characters": ("string_too_long",),
    "a list of at least {min_length} items": ("too_short",),
    "a list of at most {max_length} items": ("too_long",),
    "a string that matches {pattern}": ("string_pattern_mismatch",),
}
WANTED = {kind: words for words, kinds in _KINDS.items() for kind in kinds}
"""Descriptions of a valid value, by the type of pydantic's error."""


def describe(error: Any) -> str:
    """Return what is wrong with a value, to follow its name: `must be an integer; got "x"`.

    error: one of `ValidationError.errors()`. Messages of validators are returned as they are."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_not_found":
        return "must be an object with a type"
    if kind not in WANTED:
        return str(error["msg"])
    return f"must be {WANTED[kind].format(**context)}; got {_shown(error.get('input'))}"


def _shown(value: Any) -> str:
    """Return a short JSON of a value, or what kind of value it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    try:
        text = json.dumps(value if not isinstance(value, str) else value[: MAX_SHOWN + 1])
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
