"""JSON schemas of structured outputs: adapt them to llguidance, and bound the cost of that."""

from __future__ import annotations

import json
import math
import re
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
MAX_IN_TWO_ORDERS = 3  # objects that are in a grammar twice
MAX_MULTIPLE = 100_000  # sum of the coefficients of a schema's `multipleOf`: 10 µs each
_INT64_END = 2.0**63  # as an upper bound of integers: all of int64
_LARGEST = math.nextafter(_INT64_END, 0.0)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_OF_OBJECTS = (
    "type",
    "properties",
    "required",
    "additionalProperties",
    "minProperties",
    "maxProperties",
)
_VALUES = ("const", "enum", "default", "examples")
_OF_SAME_VALUE = ("allOf", "anyOf", "oneOf")
_SUBSCHEMAS = (*_OF_SAME_VALUE, "prefixItems", "items", "additionalProperties")
_NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def prepare(schema: Any, *, lenient: bool) -> Any:
    """Return a copy of a JSON schema as the grammar enforces it.

    Unless `lenient`, objects that declare properties get `additionalProperties: false`, if they do
    not say otherwise. In those that stay open, optional properties may come in any order.

    Objects whose properties are in several schemas (members of `allOf`; `$ref` or `anyOf` next to
    `properties`) are not changed: each schema would forbid the others' properties.

    Raises ValueError, unless `lenient`, for a minimum of properties that repeated ones could reach.
    """
    schema = json.loads(json.dumps(schema))  # a copy, in which no two parts are one object
    nodes, shared = _schemas(schema)
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)
    own = [node for node in nodes if _declares(node) and id(node) not in shared]
    for node in own if not lenient else ():
        if _names(node, "properties").keys() >= _required(node):
            node.setdefault("additionalProperties", False)
    for node in nodes if not lenient else ():
        least = node.get("minProperties")
        repeats = node.get("additionalProperties") is not False or "patternProperties" in node
        if repeats and isinstance(least, int) and least > max(1, len(_required(node))):
            raise ValueError(
                f"has minProperties {least} with properties that the schema does not name, which "
                "cannot be enforced: an answer may repeat one"
            )
    is_evadable = not lenient and any(map(is_open, nodes))
    free = [node for node in own if is_open(node) and "patternProperties" not in node]
    num_patterns = sum(len(_names(node, "patternProperties")) for node in nodes)
    num_patterns += sum(len(_names(node, "properties")) for node in free)
    in_two_orders = [node for node in free if _declares_optional_first(node)]
    if num_patterns <= MAX_PATTERNS:
        for node in free:
            _free_order(node, and_declared=len(in_two_orders) <= MAX_IN_TWO_ORDERS)
    if is_evadable:
        # Else \u could spell the name of a declared property.
        schema["x-guidance"] = {"json_allowed_escapes": 'nrbtf\\"'}
    return schema


def _required(node: dict[str, Any]) -> set[str]:
    return {name for name in _listed(node.get("required")) if isinstance(name, str)}


def _declares_optional_first(node: dict[str, Any]) -> bool:
    """Return True if an optional property is declared before a required one."""
    is_required = [name in _required(node) for name in _names(node, "properties")]
    return is_required != sorted(is_required, reverse=True)


def _free_order(node: dict[str, Any], *, and_declared: bool) -> None:
    """Let optional properties come in any order, after the required ones.

    llguidance has `properties` only in their order, before all others, and `patternProperties` in
    any. `and_declared`: or all in the order in which the schema declares them, which may be that of
    thinking before answering. Otherwise those declared before a required one keep their place."""
    given, required = _names(node, "properties"), _required(node)
    declared = {key: value for key, value in node.items() if key in _OF_OBJECTS}
    first: set[str] = set()
    if _declares_optional_first(node) and not and_declared:
        names = list(given)
        first = set(names[: max(names.index(name) for name in required if name in given)])
    optional = [name for name in given if name not in required | first]
    if not optional:
        return
    patterns = {f"^{re.escape(name)}$": given[name] for name in optional}
    kept = {name: given[name] for name in given if name not in optional}
    freed = {**declared, "properties": kept, "patternProperties": patterns}
    if _declares_optional_first(node) and and_declared:
        for key in declared:
            del node[key]
        node["anyOf"] = [declared, freed]
    else:
        node |= freed


def is_open(node: dict[str, Any]) -> bool:
    is_closed = node.get("additionalProperties") is False
    return "patternProperties" in node or ("properties" in node and not is_closed)


def _schemas(schema: Any) -> tuple[list[dict[str, Any]], set[int]]:
    """Return the schemas in a schema, and the ids of those that others complete."""
    nodes, left = [], [schema]
    while left:
        if isinstance(node := left.pop(), dict):
            nodes.append(node)
            left += [one for key in _SUBSCHEMAS for one in _listed(node.get(key))]
            left += [one for key in _NAMED_SUBSCHEMAS for one in _names(node, key).values()]
    shared: set[int] = set()
    left = [node for node in nodes if _num_parts(node) > 1]
    while left:
        node = left.pop()
        if isinstance(node, dict) and id(node) not in shared:
            shared.add(id(node))
            left += [one for key in _OF_SAME_VALUE for one in _listed(node.get(key))]
            left.append(_referenced(schema, node.get("$ref")))
    return nodes, shared


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


def limit_numbers(schema: Any) -> None:
    """Change bounds in place that the grammar cannot express to ones within them.

    llguidance compares doubles, and has integers of 64 bits. Bounds of all types of Go, Rust and C
    work; of uint64, the lower half of the values.

    Raises ValueError for values and ranges of which that would leave nothing."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            for value in (node.get("const"), *_listed(node.get("enum"))):
                _require_exact(value)
            _limit_range(node)
            left += [value for key, value in node.items() if key not in _VALUES]


def _require_exact(value: Any) -> None:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list | dict):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int) and (abs(one) > _LARGEST or one != float(one)):
            raise ValueError(
                f"has the value {one}. Integers beyond 2^53 cannot be enforced exactly; a string "
                "can"
            )


def _limit_range(node: dict[str, Any]) -> None:
    given = "has numbers " + " and ".join(f"{key} {node[key]}" for key in _BOUNDS if key in node)
    kinds = _listed(node.get("type"))
    is_integer = "integer" in kinds and "number" not in kinds
    highest = _INT64_END if is_integer else _LARGEST
    lower = [_inside(node, key, -_LARGEST, highest) for key in ("minimum", "exclusiveMinimum")]
    upper = [_inside(node, key, -_LARGEST, highest) for key in ("maximum", "exclusiveMaximum")]
    least = max((bound for bound in lower if bound is not None), default=-math.inf)
    most = min((bound for bound in upper if bound is not None), default=math.inf)
    if least > most and max(abs(least), abs(most)) >= 2**53:
        raise ValueError(f"{given}. Ranges beyond 2^53 cannot be enforced exactly")


def _inside(node: dict[str, Any], key: str, lowest: float, highest: float) -> float | None:
    """Replace a bound by the next double within it, and return that."""
    given = node.get(key)
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    if given == 2**63 - 1:  # of int64
        given = _INT64_END
    is_lower = key.lower().endswith("minimum")
    if (given > highest) if is_lower else (given < lowest):
        raise ValueError(f"has a {key} of {given}; numbers so large cannot be enforced")
    bound = float(min(max(given, lowest), highest))
    if is_lower and bound < min(given, highest):
        bound = math.nextafter(bound, math.inf)
    elif not is_lower and bound > max(given, lowest):
        bound = math.nextafter(bound, -math.inf)
    if bound != given:
        node[key] = int(bound)
    return bound


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
