"""Calls of tools in a model's text: what is read is the same in whatever pieces the text comes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.text.reasoning import ReasoningSplitter
from toolkit.text.tool_formats import FORMATS, Hermes, Llama3, Mistral, ToolFormat, detect

PARIS = '{"city": "Paris", "days": [1, 2]}'
TRICKY = r'{"text": "a \"}\" and \\", "more": {"b": [{}, "]"]}}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'

ANSWERS: list[tuple[type[ToolFormat], str, str, list[tuple[str, str]]]] = [
    # format, the model's text, content, calls
    (Hermes, "Just words, and a < b.", "Just words, and a < b.", []),
    (Hermes, "Words \n ", "Words \n ", []),
    (Hermes, HERMES_CALL, "", [("weather", PARIS)]),
    (Hermes, f"I look.\n{HERMES_CALL}\n", "I look.", [("weather", PARIS)]),
    (Hermes, f"{HERMES_CALL}\n{HERMES_CALL}", "", [("weather", PARIS)] * 2),
    (
        Hermes,
        f'<tool_call>{{"name": "note", "arguments": {TRICKY}}}</tool_call> done',
        " done",
        [("note", TRICKY)],
    ),
    (
        Hermes,
        '<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>',
        "",
        [("late", '{"a": 1}')],
    ),
    (Hermes, '<tool_call>{"name": "bare"}</tool_call>', "", [("bare", "{}")]),
    (Hermes, "See <tool_call>no JSON</tool_call>", "See <tool_call>no JSON</tool_call>", []),
    (Hermes, '<tool_call>{"nome": "x"}</tool_call>', '<tool_call>{"nome": "x"}</tool_call>', []),
    (Hermes, '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    (Hermes, '<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    (Hermes, "<tool_cal", "<tool_cal", []),
    (Hermes, "é 漢 <tool_call>", "é 漢 <tool_call>", []),
    (Llama3, f'{{"name": "weather", "parameters": {PARIS}}}', "", [("weather", PARIS)]),
    (
        Llama3,
        f' <|python_tag|>{{"name": "weather", "parameters": {PARIS}}}',
        "",
        [("weather", PARIS)],
    ),
    (
        Llama3,
        f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "note", "arguments": {TRICKY}}}',
        "",
        [("weather", PARIS), ("note", TRICKY)],
    ),
    (Llama3, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    (Llama3, '{"a": [1, 2]} and more', '{"a": [1, 2]} and more', []),
    (Llama3, "  Hello {", "  Hello {", []),
    (Llama3, "", "", []),
    (Llama3, '{"name": "weath', '{"name": "weath', []),
    (
        Mistral,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]',
        "",
        [("weather", PARIS)],
    ),
    (
        Mistral,
        f'Sure.[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"arguments": {TRICKY}, "name": "note"}}]',
        "Sure.",
        [("weather", PARIS), ("note", TRICKY)],
    ),
    (
        Mistral,
        f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]note[CALL_ID]abc123DEF[ARGS]{TRICKY}",
        "",
        [("weather", PARIS), ("note", TRICKY)],
    ),
    (Mistral, f"[TOOL_CALLS]weather{PARIS}", "", [("weather", PARIS)]),
    (Mistral, "[TOOL_CALLS] nothing here", "[TOOL_CALLS] nothing here", []),
    (Mistral, "a [TOOL", "a [TOOL", []),
]


def read(parser: ToolFormat, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", []
    for piece in [piece for part in parts for piece in parser.add(part)] + parser.end():
        if piece.index is None:
            content += piece.text
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.text))
        else:
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.text)
    return content, calls


def cut_everywhere(text: str) -> list[list[str]]:
    """Whole, character by character, and cut at any one or two places."""
    places = range(1, len(text))
    cuts = [
        (),
        *itertools.combinations(places, 1),
        *itertools.islice(itertools.combinations(places, 2), 0, None, 7),
    ]
    parts = [[text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))] for cut in cuts]
    return [*parts, list(text)]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_an_answer_is_read_the_same_in_whatever_pieces_it_comes(form, text, content, calls):
    for parts in cut_everywhere(text):
        assert read(form(["weather", "note"]), parts) == (content, calls), parts


@pytest.mark.parametrize("form", [Hermes, Mistral, Llama3])
def test_only_the_first_call_counts_where_calls_are_not_parallel(form):
    text = {
        Hermes: f"{HERMES_CALL}\n{HERMES_CALL} bye",
        Llama3: f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "weather", "parameters": {PARIS}}}',
        Mistral: f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "b", "arguments": {{}}}}]',
    }[form]
    for parts in cut_everywhere(text):
        assert read(form(["weather"], parallel=False), parts) == ("", [("weather", PARIS)])


def test_arguments_are_told_as_they_come():
    parser = Hermes(["weather"])
    told = [
        parser.add(part)
        for part in ('<tool_call>{"name": "weather", "arguments": {', '"ci', 'ty": 1}', "}")
    ]
    assert [[(p.index, p.name, p.text) for p in pieces] for pieces in told] == [
        [(0, "weather", "{")],
        [(0, None, '"ci')],
        [(0, None, 'ty": 1}')],
        [],
    ]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call><function=...>", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_the_template(marks, expected):
    assert detect(marks) == expected


def test_ids_are_what_the_formats_templates_take():
    assert len(Mistral.new_id()) == 9
    assert Mistral.new_id().isalnum()
    assert len({form.new_id() for form in FORMATS.values() for _ in range(100)}) == 300


def split(splitter: ReasoningSplitter, parts: list[str]) -> tuple[str, str]:
    told = [splitter.add(part) for part in parts] + [splitter.add("", ended=True)]
    return "".join(reasoning for reasoning, _ in told), "".join(rest for _, rest in told)


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
def test_reasoning_is_split_the_same_in_whatever_pieces_it_comes(state, text, expected):
    for parts in cut_everywhere(text):
        assert split(ReasoningSplitter(state), parts) == expected, parts


@pytest.mark.parametrize(
    "text", [text for _, text, _, calls in ANSWERS if calls and "ci" not in text[-3:]]
)
def test_whole_calls_have_arguments_that_are_json(text):
    form = next(form for form, other, _, _ in ANSWERS if other == text)
    assert all(
        isinstance(json.loads(arguments), dict)
        for _, arguments in read(form(["weather", "note"]), [text])[1]
    )


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
    form=st.sampled_from(list(FORMATS.values())),
    parts=st.lists(st.sampled_from(PIECES), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    parallel=st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_no_text_breaks_a_parser_or_is_read_differently_in_pieces(form, parts, cuts, parallel):
    text = "".join(parts)
    places = sorted({cut for cut in cuts if cut < len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise((0, *places, len(text)))]
    whole = read(form(["weather"], parallel=parallel), [text])
    assert read(form(["weather"], parallel=parallel), pieces) == whole
    if not whole[1]:
        assert whole[0] == text
