"""Numbers of JSON schemas that doubles or integers of 64 bits cannot hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from toolkit.errors import InvalidParamError
from toolkit.sampling.structured_outputs import StructuredOutputsParams

INT64, UINT64, FLOAT32 = 2**63, 2**64, 3.4028234663852886e38
NUMBERS = [
    *(0, 5, -5, 2**53, 2**53 + 1, -(2**53) - 1, 2**62 + 1, INT64 - 1, INT64, -INT64 - 1, UINT64),
    *(175928847299117063, 175928847299117056, -(10**19), 10**30, -(10**30)),
]
BEYOND = [number for number in NUMBERS if abs(number) >= INT64]


def allows(constraint: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), StructuredOutputsParams(**constraint).to_grammar())
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and (
        matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("schema", "unreachable"),
    [
        ({"minimum": -INT64, "maximum": INT64 - 1}, []),
        ({"minimum": -INT64}, []),
        ({"minimum": 0, "maximum": UINT64 - 1}, [INT64]),
        ({"minimum": -1e19, "maximum": 1e19}, BEYOND),
        ({"exclusiveMinimum": -FLOAT32, "exclusiveMaximum": FLOAT32}, BEYOND),
        ({"maximum": 175928847299117063}, [175928847299117063]),
        ({"minimum": 175928847299117063}, [175928847299117063]),
        ({"const": 2**60}, []),
        ({"enum": [1, "a", -(2**53)]}, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_bounds_of_integers_hold(schema, unreachable, kind):
    """No integer outside comes through, and all inside but those that are listed."""
    schema = {"type": "integer", **schema} if "enum" not in schema else schema
    text = json.dumps(schema)
    constraint = {"json": schema} if kind == "json" else {"grammar": f"start: %json {text}"}
    for number in NUMBERS:
        is_inside = (
            (number >= schema.get("minimum", number))
            and (number <= schema.get("maximum", number))
            and abs(number) < schema.get("exclusiveMaximum", 10**40)
            and number == schema.get("const", number)
            and number in schema.get("enum", [number])
        )
        expected = is_inside and number not in unreachable
        assert allows(constraint, str(number)) == expected, number


@pytest.mark.parametrize("bound", [FLOAT32, 1e19, float(INT64)])
def test_bounds_of_any_number_work(bound):
    constraint = {"json": {"type": "number", "minimum": -bound, "maximum": bound}}
    assert allows(constraint, "1.5")
    assert allows(constraint, "-5000000000.25")
    assert not allows(constraint, "1" + "0" * 40)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"enum": [3, 175928847299117063]}, "175928847299117063"),
        ({"const": {"id": [175928847299117063]}}, "175928847299117063"),
        ({"const": INT64}, str(INT64)),
        ({"const": 10**400}, str(10**400)),  # no double is so large
        ({"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 1}, str(2**60 + 1)),
        ({"type": "integer", "minimum": 1e19}, "1e+19"),
        ({"properties": {"a": {"anyOf": [{"enum": [-(2**53) - 1]}]}}}, str(-(2**53) - 1)),
    ],
)
def test_numbers_without_an_exact_double_are_refused(schema, named):
    for constraint in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(InvalidParamError) as caught:
            StructuredOutputsParams(**constraint).to_grammar()
        assert "cannot be enforced" in caught.value.message
        assert named in caught.value.message
