"""Structural tags: texts that match and texts that do not, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from toolkit.errors import InvalidRequestError
from toolkit.sampling.structured_outputs import StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ONE = {"type": "json_schema", "json_schema": {"const": 1}}
GET = '<function=get>{"city": "Oslo"}</function>'


def tag(begin: str, content: dict[str, Any], *ends: str) -> dict[str, Any]:
    end = ends[0] if len(ends) == 1 else list(ends)
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [tag("<a>", ONE, "</a>"), tag("<b>", {"type": "any_text"}, "</b>")]
    return {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": tags, **more}


OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=get>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=now>", "schema": {"const": 1}, "end": ""},
    ],
    "triggers": ["<function="],
}
SEQUENCE = {
    "type": "sequence",
    "elements": [
        tag("<think>", {"type": "any_text"}, "</think>"),
        {"type": "const_string", "value": "\n"},
        {"type": "or", "elements": [{"type": "regex", "pattern": "[a-c]+/x"}, ONE]},
    ],
}
SEPARATED = {
    "type": "tags_with_separator", "separator": ",", "tags": [tag("<a>", ONE, "</a>", "</b>")],
}  # fmt: skip
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # structural tag, texts that match, texts that do not
    (
        OLD,
        ["", "Hello", f"I look: {GET} Done.", f"{GET}{GET}", "<function=now>1 or so"],
        ['<function=get>{"city": "Rome"}</function>', "<function=other>", "So <function=get>{}"],
    ),
    (
        {"format": SEQUENCE},
        ["<think>a < b</think>\nabc/x", "<think></think>\n1"],
        ["1", "<think>a</think>\nd", "<think>a</think>\n1</think>"],
    ),
    ({"format": SEPARATED}, ["", "<a>1</a>", "<a>1</b>,<a>1</a>"], ["<a>1</a>,", "<a>2</a>"]),
    ({"format": SEPARATED | {"at_least_one": True}}, ["<a>1</a>"], [""]),
    ({"format": SEPARATED | {"stop_after_first": True}}, ["<a>1</a>"], ["<a>1</a>,<a>1</a>"]),
    ({"format": triggered()}, ["x<a>1</a>y<b>z</b>", "x"], ["<a>2</a>", "<aa>"]),
    ({"format": triggered(at_least_one=True)}, ["<a>1</a>x<b></b>"], ["x<a>1</a>", "x"]),
    ({"format": triggered(stop_after_first=True)}, ["x<a>1</a>", "x"], ["<a>1</a>x"]),
    (
        {"format": triggered(at_least_one=True, stop_after_first=True)},
        ["<a>1</a>", "<b>x</b>"],
        ["<a>1</a>x", "x"],
    ),
    ({"format": {"type": "any_text"}}, ["", "a\nb"], []),
]


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    data = [*text.encode()]
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(("given", "good", "bad"), CASES)
def test_structural_tag_allows_the_right_texts(
    given: dict[str, Any], good: list[str], bad: list[str], as_text: bool
) -> None:
    params = StructuredOutputsParams(structural_tag=json.dumps(given) if as_text else given)
    grammar = params.to_grammar()
    assert [text for text in good + bad if matches(grammar, text)] == good


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ({}, "structures must be a list"),
        ({"structures": [5], "triggers": ["a"]}, r"structures\[0\] must be an object"),
        ({**OLD, "triggers": ["<call"]}, r"tags\[0\].begin must begin with one of the triggers"),
        ({"format": {"type": "xml"}}, "format.type must be one of const_string, .*; got 'xml'"),
        ({"format": {"type": "const_string"}}, "format.value must be a text"),
        ({"format": {"type": "regex", "pattern": "("}}, "regular expression is not valid"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "no"}}}, "Invalid type: no"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, ONE]}},
            r"format.elements\[0\] is any_text, and something follows it",
        ),
        ({"format": tag("<a>", ONE)}, "format.end must be a text"),
    ],
)
def test_invalid_structural_tag_is_refused_with_the_reason(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        StructuredOutputsParams(structural_tag=given).to_grammar()
