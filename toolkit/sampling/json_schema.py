"""JSON schemas of structured outputs: close their objects, and bound the cost of compiling them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

MAX_RULES_SIZE = 64 * 1024
"""Characters of a regular expression, of a schema's patterns, or of a grammar without its schemas.
With llguidance's limits and those below this bounds the time of a compilation: the worst that we
found takes two seconds, a usual one a millisecond."""
MAX_RULES = 1000  # rules or references of a grammar: llguidance recurses over them
MAX_PROPERTIES = 2000  # of all objects in a schema: the time grows with the square
MAX_PATTERNS = 200  # of `patternProperties`: each is compared with each
MAX_MULTIPLE = 100_000  # sum of the coefficients of a schema's `multipleOf`: 10 µs each
_OF_SAME_VALUE = ("allOf", "anyOf", "oneOf")
_SUBSCHEMAS = (*_OF_SAME_VALUE, "prefixItems", "items", "additionalProperties")
_NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def close_objects(schema: Any) -> Any:
    """Return a copy with `additionalProperties: false` where an object declares properties.

    Objects that say otherwise are not changed, nor those whose properties are in several schemas
    (members of `allOf`; `$ref` or `anyOf` next to `properties`): each would forbid the others'."""
    schema = json.loads(json.dumps(schema))  # a copy, in which no two parts are one object
    nodes, left = [], [schema]
    while left:
        if isinstance(node := left.pop(), dict):
            nodes.append(node)
            left += [one for key in _SUBSCHEMAS for one in _listed(node.get(key))]
            left += [one for key in _NAMED_SUBSCHEMAS for one in _names(node, key).values()]
    shared: set[int] = set()  # ids of schemas that others complete
    left = [node for node in nodes if _num_parts(node) > 1]
    while left:
        node = left.pop()
        if isinstance(node, dict) and id(node) not in shared:
            shared.add(id(node))
            left += [one for key in _OF_SAME_VALUE for one in _listed(node.get(key))]
            left.append(_referenced(schema, node.get("$ref")))
    for node in nodes:
        required = [name for name in _listed(node.get("required")) if isinstance(name, str)]
        names = _names(node, "properties").keys()
        if _declares(node) and id(node) not in shared and names >= set(required):
            node.setdefault("additionalProperties", False)
    return schema


def _declares(node: dict[str, Any]) -> bool:
    return "properties" in node or "patternProperties" in node


def _num_parts(node: dict[str, Any]) -> int:
    """Count the schemas that apply to a node's value at the same time."""
    others = sum(key in node for key in ("$ref", "anyOf", "oneOf"))
    return _declares(node) + others + len(_listed(node.get("allOf")))


def _names(node: dict[str, Any], key: str) -> dict[str, Any]:
    return found if isinstance(found := node.get(key), dict) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _referenced(schema: Any, reference: Any) -> Any:
    """Return the part of the schema that a reference such as `#/$defs/x` names, if any."""
    if not (isinstance(reference, str) and reference.startswith("#") and isinstance(schema, dict)):
        return None
    for key in reference.split("/")[1:]:
        schema = schema.get(key.replace("~1", "/").replace("~0", "~"))
        if not isinstance(schema, dict):
            return None
    return schema


def check_cost(rules: str, schemas: Sequence[Any]) -> None:
    """Raises ValueError for what would take too much time or stack to compile."""
    nodes = [node for schema in schemas for node in _objects(schema)]

    def each(keyword: str, *kinds: type) -> list[Any]:
        return [value for node in nodes if isinstance(value := node.get(keyword), kinds)]

    pattern_names = [name for names in each("patternProperties", dict) for name in names]
    patterns = each("pattern", str) + each("whitespace_pattern", str) + pattern_names
    num_properties = max(
        sum(map(len, each("properties", dict))), sum(map(len, each("required", list)))
    )
    references = each("$ref", str)
    check_count(len(rules) + sum(map(len, patterns)), MAX_RULES_SIZE, "characters of patterns")
    check_count(rules.count("\n") + len(references), MAX_RULES, "rules or references")
    check_count(num_properties, MAX_PROPERTIES, "properties")
    check_count(len(pattern_names), MAX_PATTERNS, "patternProperties")
    multiples = [_coefficient(value) for value in each("multipleOf", int, float)]
    _check_multiple(sum(multiples))
    if references or each("allOf", list):  # which may give one value several of them
        _check_multiple(math.lcm(*multiples))


def _check_multiple(multiple: int) -> None:
    if multiple > MAX_MULTIPLE:
        raise ValueError(
            f"has too large a multipleOf ({multiple:,}); at most {MAX_MULTIPLE:,} works"
        )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects within a JSON value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def _coefficient(number: float) -> int:
    """Return the digits of a number, without zeros at the end: 25 for 2.5 and for 2500."""
    digits = Decimal(str(number + 0)).normalize().as_tuple().digits  # + 0: not of a boolean
    return int("".join(map(str, digits)) or 0)


def check_count(count: int, limit: int, noun: str) -> None:
    """Raises ValueError above the limit."""
    if count > limit:
        raise ValueError(f"has {count:,} {noun}; at most {limit:,} are allowed")
