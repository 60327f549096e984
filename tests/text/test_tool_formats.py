"""Parsers of tool calls and reasoning: the output does not depend on how the text is split."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.api.openai.answer_parts import AnswerParser, AnswerPlan
from toolkit.api.openai.tools import CalledFunction, Tool, ToolCall
from toolkit.text.generic_tools import GenericFormat
from toolkit.text.harmony import HarmonyFormat
from toolkit.text.parsers import TOOL_FORMATS, detect_format
from toolkit.text.reasoning import ReasoningFormat
from toolkit.text.tool_formats import (
    HermesFormat,
    Llama3Format,
    MistralFormat,
    ToolFormat,
)

PARIS = '{"city": "Paris", "days": [1, 2]}'
TRICKY = r'{"text": "a \"}\" and \\", "more": {"b": [{}, "]"]}}'
GENERIC_CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'

ANSWERS: list[tuple[type[ToolFormat], str, str, list[tuple[str, str]]]] = [
    # format, text of the model, content, calls
    (HermesFormat, "Just words, and a < b.", "Just words, and a < b.", []),
    (HermesFormat, "Words \n ", "Words \n ", []),
    (HermesFormat, HERMES_CALL, "", [("weather", PARIS)]),
    (HermesFormat, f"I look.\n{HERMES_CALL}\n", "I look.", [("weather", PARIS)]),
    (HermesFormat, f"{HERMES_CALL}\n{HERMES_CALL}", "", [("weather", PARIS)] * 2),
    (
        HermesFormat,
        f'<tool_call>{{"name": "note", "arguments": {TRICKY}}}</tool_call> done',
        " done",
        [("note", TRICKY)],
    ),
    (
        HermesFormat,
        '<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>',
        "",
        [("late", '{"a": 1}')],
    ),
    (HermesFormat, '<tool_call>{"name": "bare"}</tool_call>', "", [("bare", "{}")]),
    (HermesFormat, f"{HERMES_CALL[:-13]}}}\n</tool_call>\n", "", [("weather", PARIS)]),
    (HermesFormat, "See <tool_call>no JSON</tool_call>", "See <tool_call>no JSON</tool_call>", []),
    (
        HermesFormat,
        '<tool_call>{"nome": "x"}</tool_call>',
        '<tool_call>{"nome": "x"}</tool_call>',
        [],
    ),
    (HermesFormat, '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    (HermesFormat, '<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    (HermesFormat, "<tool_cal", "<tool_cal", []),
    (HermesFormat, "é 漢 <tool_call>", "é 漢 <tool_call>", []),
    (Llama3Format, f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    (
        Llama3Format,
        f' <|python_tag|>{{"name": "weather", "parameters": {PARIS}}}',
        "",
        [("weather", PARIS)],
    ),
    (
        Llama3Format,
        f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "note", "arguments": {TRICKY}}}',
        "",
        [("weather", PARIS), ("note", TRICKY)],
    ),
    (Llama3Format, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    (Llama3Format, '{"a": [1, 2]} and more', '{"a": [1, 2]} and more', []),
    (Llama3Format, "  Hello {", "  Hello {", []),
    (Llama3Format, "", "", []),
    (Llama3Format, '{"name": "weath', '{"name": "weath', []),
    (
        MistralFormat,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]',
        "",
        [("weather", PARIS)],
    ),
    (
        MistralFormat,
        f'Sure.[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, '
        f'{{"arguments": {TRICKY}, "name": "note"}}]',
        "Sure.",
        [("weather", PARIS), ("note", TRICKY)],
    ),
    (
        MistralFormat,
        f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]note[CALL_ID]abc123DEF[ARGS]{TRICKY}",
        "",
        [("weather", PARIS), ("note", TRICKY)],
    ),
    (MistralFormat, f"[TOOL_CALLS]weather{PARIS}", "", [("weather", PARIS)]),
    (MistralFormat, "[TOOL_CALLS] nothing here", "[TOOL_CALLS] nothing here", []),
    (MistralFormat, "a [TOOL", "a [TOOL", []),
    (GenericFormat, GENERIC_CALL, "", [("weather", PARIS)]),
    (GenericFormat, f"{GENERIC_CALL}\n\n{GENERIC_CALL}\n", "", [("weather", PARIS)] * 2),
    (GenericFormat, f"I look.\n\n {GENERIC_CALL}", "I look.", [("weather", PARIS)]),
    (GenericFormat, f"I:\n```json\n{GENERIC_CALL}\n```\n", "I:", [("weather", PARIS)]),
    (GenericFormat, f"```\n[{GENERIC_CALL},\n{GENERIC_CALL}]\n```", "", [("weather", PARIS)] * 2),
    (GenericFormat, f"<tool_call>\n{GENERIC_CALL}\n</tool_call> So", "So", [("weather", PARIS)]),
    (GenericFormat, '{"name": "note"}', "", [("note", "{}")]),
    (GenericFormat, f"Say {GENERIC_CALL} then.", f"Say {GENERIC_CALL} then.", []),
    (GenericFormat, '```json\n{"name": "Bob"}\n```\n', '```json\n{"name": "Bob"}\n```\n', []),
    (GenericFormat, "int f()\n{\n  return 1;\n}\n", "int f()\n{\n  return 1;\n}\n", []),
    (GenericFormat, "[1, 2]\n``\n <tool", "[1, 2]\n``\n <tool", []),
    (GenericFormat, " \n", " \n", []),
]


def parse(parser: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and each call as (name, arguments)."""
    content, calls = "", []
    for part in [part for piece in pieces for part in parser.add(piece)] + parser.end():
        if part.index is None:
            content += part.text
        elif part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, part.text))
        else:
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.text)
    return content, calls


def splits(text: str) -> list[list[str]]:
    """The text as one piece, as characters, cut at any place, and at many pairs of places."""
    places = range(1, len(text))
    cuts = [
        (),
        *itertools.combinations(places, 1),
        *itertools.islice(itertools.combinations(places, 2), 0, None, 23),
    ]
    pieces = [[text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))] for cut in cuts]
    return [*pieces, list(text)]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), ANSWERS)
def test_parser_output_does_not_depend_on_splits(tool_format, text, content, calls):
    for pieces in splits(text):
        assert parse(tool_format(["weather", "note"]), pieces) == (content, calls), pieces


NO_OBJECTS = [
    (json.dumps('{"a": [1, "\\u00e9"]}'), '{"a": [1, "\\u00e9"]}'),
    ('"{}"', "{}"),
    *((value, "{}") for value in ("null", '""', "7", "true", "[1, {}]", '"text"', '"[1]"')),
]
"""Arguments that models write, and those that clients expect."""


@pytest.mark.parametrize(("given", "expected"), NO_OBJECTS)
def test_arguments_are_an_object(given, expected):
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    expected_calls = [("f", expected)]
    for tool_format, text in (
        (HermesFormat, f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'),
        (HermesFormat, f'<tool_call>{{"arguments": {given}, "name": "f"}}</tool_call>'),
        (Llama3Format, f'{{"name": "f", "parameters": {given}}}'),
        (MistralFormat, f'[TOOL_CALLS][{{"name": "f", "arguments": {given}}}]'),
        (HarmonyFormat, f"{call}{given}<|call|>"),
    ):
        for pieces in ([text], text):
            assert parse(tool_format(["f"]), pieces)[1] == expected_calls, tool_format
    history = ToolCall(id="1", function=CalledFunction(name="f", arguments=given)).to_template()
    assert history["function"]["arguments"] == json.loads(expected)


@pytest.mark.parametrize("arguments", ['{"city": "Os', "plain text"])
def test_broken_arguments_of_a_conversation_stay_text(arguments):
    history = ToolCall(id="1", function=CalledFunction(name="f", arguments=arguments)).to_template()
    assert history["function"]["arguments"] == arguments


@pytest.mark.parametrize("tool_format", [HermesFormat, MistralFormat, Llama3Format])
def test_parser_without_parallel_ignores_later_calls(tool_format):
    llama_call = f'{{"name": "weather", "parameters": {PARIS}}}'
    mistral_call = f'{{"name": "weather", "arguments": {PARIS}}}'
    text = {
        HermesFormat: f"{HERMES_CALL}\n{HERMES_CALL} bye",
        Llama3Format: f"{llama_call}; {llama_call}",
        MistralFormat: f'[TOOL_CALLS][{mistral_call}, {{"name": "b", "arguments": {{}}}}]',
    }[tool_format]
    for pieces in splits(text):
        assert parse(tool_format(["weather"], parallel=False), pieces) == ("", [("weather", PARIS)])


CALLS = [("weather", PARIS), ("note", '{"a": []}')]
CALL_TEXTS: dict[type[ToolFormat], str] = {
    HermesFormat: f'{HERMES_CALL}\n<tool_call>\n{{"name": "note", "arguments": {{"a": []}}}}\n'
    "</tool_call>",
    Llama3Format: f'{{"name": "weather", "parameters": {PARIS}}}; '
    '{"name": "note", "parameters": {"a": []}}',
    MistralFormat: f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, '
    '{"name": "note", "arguments": {"a": []}}]',
}
NAMED_CALLS = f'[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]note[CALL_ID]abc[ARGS]{{"a": []}}'


@pytest.mark.parametrize("needs_call", [True, False])
@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        *CALL_TEXTS.items(),
        (HermesFormat, f"I look. {CALL_TEXTS[HermesFormat]}"),
        (Llama3Format, f"<|python_tag|>{CALL_TEXTS[Llama3Format]}"),
        (MistralFormat, f"I look. {CALL_TEXTS[MistralFormat]}"),
        (MistralFormat, NAMED_CALLS),
    ],
)
def test_cut_calls_never_become_content(tool_format, text, needs_call):
    """At every length, in any pieces, cut by max_tokens, a stop string or an abort."""
    tools = [Tool.of(name, None, None, None) for name, _ in CALLS]
    plan = AnswerPlan(None, tool_format, tools, True, needs_call, False)
    full = "I look." if text.startswith("I look") and not needs_call else ""
    for length in range(len(text)):
        for step in (length, 1, 7):
            cut = text[:length]
            pieces = [cut[i : i + step] for i in range(0, length, step or 1)]
            parser = AnswerParser(plan)
            reason, stop = [("length", None), ("stop", "x"), ("abort", None)][length % 3]
            deltas = [parser.add(one) for one in pieces] + [parser.add("", reason, stop)]
            content = "".join(delta.content or "" for delta in deltas)
            calls: list[list[str]] = []
            for call in [call for delta in deltas for call in delta.tool_calls or []]:
                if call.id is not None:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
            # One character of a marker may as well be content.
            assert full.startswith(content.rstrip("<[" * (not needs_call)).rstrip()), cut
            for (name, arguments), (known, complete) in zip(
                calls, CALLS[: len(calls)], strict=True
            ):
                assert (name, complete[: len(arguments)]) == (known, arguments), cut
            message = AnswerParser(plan).message(cut, reason, stop)
            found = message.tool_calls if calls else []
            assert (message.content or "") == content
            assert [[c.function.name, c.function.arguments] for c in found] == calls
            assert parser.finish_reason(reason) in (reason, "tool_calls" if stop else reason)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HermesFormat, "if a <"),
        (HermesFormat, "<tool_call>no"),
        (Llama3Format, '{"name": "Bob"'),
        (Llama3Format, '{"city": '),
        (Llama3Format, "<b>"),
        (MistralFormat, "x [1"),
        (MistralFormat, "x ["),
    ],
)
def test_cut_content_stays_content(tool_format, text):
    parser = tool_format(["weather"])
    assert "".join(part.text for part in parser.add(text) + parser.end(is_cut=True)) == text


def test_parser_streams_arguments():
    parser = HermesFormat(["weather"])
    outputs = [
        parser.add(piece)
        for piece in ('<tool_call>{"name": "weather", "arguments": {', '"ci', 'ty": 1}', "}")
    ]
    assert [[(one.index, one.name, one.text) for one in output] for output in outputs] == [
        [(0, "weather", "{")],
        [(0, None, '"ci')],
        [(0, None, 'ty": 1}')],
        [],
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call><function=...>", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_detect_format_reads_the_template(template, expected):
    assert detect_format(template) == expected


def test_call_ids_are_unique_and_fit_the_templates():
    assert len(MistralFormat.new_id()) == 9
    assert MistralFormat.new_id().isalnum()
    ids = {tool_format.new_id() for tool_format in TOOL_FORMATS.values() for _ in range(100)}
    assert len(ids) == 100 * len(TOOL_FORMATS)


def split(splitter: ReasoningFormat, pieces: list[str]) -> tuple[str, str]:
    outputs = [splitter.add(piece) for piece in pieces] + [splitter.add("", is_last=True)]
    return "".join(reasoning for reasoning, _ in outputs), "".join(rest for _, rest in outputs)


@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        ("possible", "<think>\nI see. \n</think>\n\nYes.", ("I see.", "Yes.")),
        ("possible", "\n<think></think>Yes. ", ("", "Yes. ")),
        ("possible", " No <think>marks</think> first.", ("", " No <think>marks</think> first.")),
        ("possible", "<thin", ("", "<thin")),
        ("possible", "<think>never ends </thin", ("never ends </thin", "")),
        (
            "begun",
            "\nI see.\n\nYes </b>\n</think>\n\nYes.</think>",
            ("I see.\n\nYes </b>", "Yes.</think>"),
        ),
        ("begun", "<think>\nTwice begun</think>x", ("Twice begun", "x")),
        ("begun", "<think><think>x", ("<think>x", "")),
        ("begun", "only thoughts  ", ("only thoughts  ", "")),
        ("begun", "</think>", ("", "")),
        (None, "<think>x</think>", ("", "<think>x</think>")),
    ],
)
def test_reasoning_splitter_output_does_not_depend_on_splits(state, text, expected):
    for pieces in splits(text):
        assert split(ReasoningFormat(state), pieces) == expected, pieces


@pytest.mark.parametrize(
    "text", [text for _, text, _, calls in ANSWERS if calls and "ci" not in text[-3:]]
)
def test_complete_calls_have_json_arguments(text):
    tool_format = next(one for one, other, _, _ in ANSWERS if other == text)
    _, calls = parse(tool_format(["weather", "note"]), [text])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": "weather"',
    "é",
    " \n",
]
PIECES += [
    '"arguments": ',
    '"parameters": {',
    *'{}[],;:"\\a0',
    '"x"',
    "<",
    "null",
    PARIS,
    HERMES_CALL,
]


@given(
    tool_format=st.sampled_from(list(TOOL_FORMATS.values())),
    parts=st.lists(st.sampled_from(PIECES), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    parallel=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_parser_accepts_any_text_in_any_pieces(tool_format, parts, cuts, parallel):
    text = "".join(parts)
    places = sorted({cut for cut in cuts if cut < len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise((0, *places, len(text)))]
    content, calls = parse(tool_format(["weather"], parallel=parallel), [text])
    assert parse(tool_format(["weather"], parallel=parallel), pieces) == (content, calls)
    if not calls:
        assert content == text
