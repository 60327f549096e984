"""Harmony: answers in any pieces, compared with OpenAI's parser, and conversations."""

from __future__ import annotations

import itertools
import json
import os
import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harmony import TEMPLATE
from toolkit.config import ServerConfig
from toolkit.errors import ConfigError, InvalidRequestError
from toolkit.text.chat_template import ChatTemplates
from toolkit.text.harmony import HarmonyFormat, adapt_conversation
from toolkit.text.parsers import Parsers
from toolkit.text.tool_formats import MistralFormat

OPENING = "<|start|>assistant"
NAMES = ["weather", "note"]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Oslo"}'

Parts = list[tuple[str, str]]
"""(reasoning, text or the function's name, text) of each message."""

ANSWERS: list[tuple[str, Parts]] = [
    (f"{FINAL}Yes.", [("text", "Yes.")]),
    (f"{ANALYSIS}Hm.<|end|>{OPENING}{FINAL}Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
    (f"{ANALYSIS} a\n<|end|>{OPENING}{ANALYSIS}b", [("reasoning", " a\n"), ("reasoning", "b")]),
    (f"{ANALYSIS}Hm.<|end|>{OPENING}{CALL}[]", [("reasoning", "Hm."), ("weather", "{}")]),
    (
        f" to=functions.note<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        [("note", ARGUMENTS)],
    ),
    (f"<|channel|>commentary to=functions.note<|message|>{ARGUMENTS}", [("note", ARGUMENTS)]),
    ("<|channel|>commentary to=functions.note<|constrain|>json<|message|>{}", [("note", "{}")]),
    ("<|channel|>analysis to=functions.note code<|message|>{}", [("note", "{}")]),
    ("<|channel|>commentary to=note json<|message|>{}", [("note", "{}")]),
    ("<|channel|>commentary to=functions.other json<|message|>{}", [("other", "{}")]),
    (f"{CALL}<|call|>", [("weather", "{}")]),
    (f"{CALL}not JSON", [("weather", "not JSON")]),
    (
        f"<|channel|>commentary<|message|>I look.<|end|>{OPENING}{CALL}{ARGUMENTS}",
        [("text", "I look."), ("weather", ARGUMENTS)],
    ),
    (f"{FINAL[:-11]} <|constrain|>json<|message|>[1]", [("text", "[1]")]),
    ("<|channel|>analysis to=python code<|message|>1+1", [("reasoning", "1+1")]),
    ("<|channel|>commentary to=browser.search<|message|>{}", [("reasoning", "{}")]),
    (f"{FINAL}a < b <| c <|foo|> <", [("text", "a < b <| c <|foo|> <")]),
    ("<|channel|>final to=user<|message|>Yes.", [("text", "Yes.")]),
    ("<|message|>No channel", [("text", "No channel")]),
    # What is not harmony.
    ("Hello there, you.", [("text", "Hello there, you.")]),
    (" Hello", [("text", " Hello")]),
    ("", []),
    (f"{ANALYSIS}Hm.{FINAL}Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
    (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
    (f"{FINAL}a<|message|>b<|constrain|>c", [("text", "abc")]),
    (f"{FINAL}a<|end|>b", [("text", "a"), ("text", "b")]),
    ("<|channel|>final<|end|>", [("text", "final")]),
    (f"<|channel|>final{' so' * 100}", [("text", f"final{' so' * 100}")]),
    ("<|channel|>a<|foo|><|message|>b", [("text", "a<|foo|>b")]),
    (f"<|start|><|start|>assistant{FINAL}x", [("text", "x")]),
    ("<|channel|>", []),
    (
        "<|start|>functions.note to=assistant<|channel|>commentary<|message|>made up",
        [("reasoning", "made up")],
    ),
]  # fmt: skip


def parse(
    pieces: list[str], *, names: list[str] = NAMES, opening: str = OPENING, is_cut: bool = False
) -> Parts:
    parser = HarmonyFormat(names)
    assert parser.add(opening) == []
    parts: list[list[str]] = []
    kinds: list[Any] = []
    for one in [one for piece in pieces for one in parser.add(piece)] + parser.end(is_cut=is_cut):
        kind = one.index if one.index is not None else "reasoning" if one.is_reasoning else "text"
        if one.name is not None or one.begins_message:
            parts.append([one.name or str(kind), one.text])
            kinds.append(kind)
        else:
            assert kinds[-1] == kind
            parts[-1][1] += one.text
    return [(kind, text) for kind, text in parts]


def cut(text: str, places: list[int]) -> list[str]:
    at = [0, *sorted({place for place in places if place < len(text)}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_answer_is_messages_in_any_pieces(text, expected):
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    for place in range(len(text)):
        assert parse(cut(text, [place])) == expected


PIECES = [
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    *("<|return|>", "assistant", "analysis", "final", "commentary", " to=functions.weather"),
    *(" to=python", " ", "json", "<", "|", ">", "Hello there", "{", '"', "é\n", "functions.x"),
    *(OPENING, ANALYSIS, FINAL, CALL, ARGUMENTS, "x" * 150),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)


def without_marks(text: str) -> str:
    for mark in PIECES[:7]:
        text = text.replace(mark, "")
    return text


@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 400), max_size=8),
    opening=st.sampled_from(["", OPENING, OPENING + FINAL, OPENING + ANALYSIS]),
    is_cut=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_pieces_do_not_change_the_messages(text, places, opening, is_cut):
    found = parse([text], opening=opening, is_cut=is_cut)
    assert parse(cut(text, places), opening=opening, is_cut=is_cut) == found
    assert parse(list(text), opening=opening, is_cut=is_cut) == found


@given(
    words=st.lists(st.sampled_from(["so", "< ", "<|", "x y", "é", "{}"]), max_size=9), text=TEXTS
)
@settings(max_examples=120, deadline=None)
def test_no_text_outside_of_headers_is_lost(words, text):
    body = "-".join(words)
    for header in (ANALYSIS, FINAL, CALL, ""):
        found = parse([f"{text}<|end|>{OPENING}{header}{body}!<|end|>"])
        assert found[-1][1].endswith(f"{body}!")


def beginnings(text: str) -> list[str]:
    """Return all that may have been generated when an answer is cut: marks are tokens."""
    tokens = [one for part in re.split(r"(<\|\w+\|>)", text) for one in tokens_of(part)]
    return ["".join(tokens[:size]) for size in range(len(tokens))]


def tokens_of(part: str) -> list[str]:
    return [part] if re.fullmatch(r"<\|\w+\|>", part) else list(part)


@pytest.mark.parametrize(("text", "expected"), [one for one in ANSWERS if "foo" not in one[0]])
def test_cut_answers_begin_like_complete_ones(text, expected):
    for begin in beginnings(text):
        found = parse([begin], is_cut=True)
        assert len(found) <= len(expected), begin
        for (kind, part), (whole_kind, whole) in zip(found, expected, strict=False):
            assert kind == whole_kind, begin
            assert whole.startswith(part), begin


def test_answer_without_parallel_calls_ends_with_the_first():
    text = f"{CALL}{ARGUMENTS}<|call|>{OPENING}{FINAL}more"
    parser = HarmonyFormat(NAMES, parallel=False)
    parser.add(OPENING)
    found = [one for character in text for one in parser.add(character)] + parser.end()
    assert "".join(one.text for one in found) == ARGUMENTS
    assert parser.num_calls == 1
    assert not parser.is_within_arguments


@pytest.mark.parametrize("is_cut", [True, False])
def test_cut_arguments_are_incomplete(is_cut):
    parser = HarmonyFormat(NAMES)
    parser.add(OPENING)
    parser.add(f'{CALL}{{"city": "Os')
    parser.end(is_cut=is_cut)
    assert parser.is_within_arguments == is_cut


def test_messages_to_functions_are_reasoning_without_functions():
    assert parse([f"{CALL}{{}}<|call|>"], names=[]) == [("reasoning", "{}")]


# ---- the same as OpenAI's parser


@cache
def oracle() -> Any:
    """Return OpenAI's encoding and role. The vocabulary is a file in TIKTOKEN_ENCODINGS_BASE."""
    harmony = pytest.importorskip("openai_harmony")
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("needs TIKTOKEN_ENCODINGS_BASE, a folder with o200k_base.tiktoken")
    name = harmony.HarmonyEncodingName.HARMONY_GPT_OSS
    return harmony.load_harmony_encoding(name), harmony.Role.ASSISTANT


BODIES = st.text(max_size=40) | st.sampled_from(["a < b", "<|", "x<", '{"a": "<|en"}', " \n"])
TYPES = st.sampled_from(["", " json", " code", " <|constrain|>json", "<|constrain|>json"])


@st.composite
def harmony_messages(draw: st.DrawFn) -> str:
    channel = draw(st.sampled_from(["analysis", "commentary", "final"]))
    to = draw(st.sampled_from(["", "functions.weather", "functions.note", "python"]))
    kind = draw(TYPES) if to else ""  # OpenAI's parser takes a lone type for a recipient
    where = f" to={to}" if to else ""
    if draw(st.booleans()):
        header = f"{where}<|channel|>{channel}{kind}"
    else:
        header = f"<|channel|>{channel}{where}{kind}"
    return f"{header}<|message|>{draw(BODIES)}"


@given(messages=st.lists(harmony_messages(), min_size=1, max_size=5))
@settings(max_examples=500, deadline=None)
def test_messages_are_those_of_openai_s_parser(messages):
    encoding, assistant = oracle()
    text = f"<|end|>{OPENING}".join(messages)
    tokens = encoding.encode(text, allowed_special="all")
    expected = []
    for one in encoding.parse_messages_from_completion_tokens(tokens, assistant):
        [content] = one.content
        to = one.recipient or ""
        is_call = to.startswith("functions.")
        is_reasoning = one.channel == "analysis" or (bool(to) and one.channel != "final")
        kind = to[len("functions.") :] if is_call else "reasoning" if is_reasoning else "text"
        body = content.text if content.text.strip() or not is_call else content.text + "{}"
        if body:
            expected.append((kind, body))
    pieces = [encoding.decode_utf8([token]) for token in tokens] if text.isascii() else [text]
    assert parse(pieces) == expected


def spec(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": f"Does {name}.", "parameters": parameters}


CITY = {"type": "string", "description": "Its name"}
UNIT = {"type": "string", "enum": ["c", "f"], "default": "c"}
SPECS = [
    spec("weather", ["city"], city=CITY, unit=UNIT),
    spec("note", [], tags={"type": "array", "items": {"type": "integer"}}),
]
WORDS = st.text("abc é<|>\n", min_size=1, max_size=8)


@given(
    instruction=WORDS | st.none(),
    questions=st.lists(st.tuples(WORDS, WORDS), max_size=2),
    calls=st.lists(st.tuples(WORDS, st.sampled_from(NAMES), WORDS), max_size=3),
    has_tools=st.booleans(),
    effort=st.sampled_from(["low", "medium", "high"]),
)
@settings(max_examples=200, deadline=None)
def test_prompt_is_that_of_openai_s_renderer(instruction, questions, calls, has_tools, effort):
    encoding, _ = oracle()
    harmony = pytest.importorskip("openai_harmony")
    of, roles = harmony.Message.from_role_and_content, harmony.Role
    system = harmony.SystemContent.new().with_reasoning_effort(
        getattr(harmony.ReasoningEffort, effort.upper())
    )
    system = system.with_conversation_start_date(f"{datetime.now():%Y-%m-%d}")
    developer = harmony.DeveloperContent.new()
    if instruction is not None:
        developer = developer.with_instructions(instruction)
    if has_tools:
        developer = developer.with_function_tools(
            [harmony.ToolDescription.new(*one.values()) for one in SPECS]
        )
    theirs = [of(roles.SYSTEM, system)]
    theirs += [of(roles.DEVELOPER, developer)] if instruction is not None or has_tools else []
    ours: list[dict[str, Any]] = []
    if instruction is not None:
        ours.append({"role": "developer", "content": instruction})
    for question, answer in questions:
        theirs += [of(roles.USER, question), of(roles.ASSISTANT, answer).with_channel("final")]
        ours.append({"role": "user", "content": question})
        ours.append({"role": "assistant", "content": answer, "reasoning_content": "old"})
    theirs.append(of(roles.USER, "Now?"))
    ours.append({"role": "user", "content": "Now?"})
    for number, (thought, name, output) in enumerate(calls):
        arguments = {"n": number}
        request = of(roles.ASSISTANT, json.dumps(arguments)).with_channel("commentary")
        author = harmony.Author.new(roles.TOOL, f"functions.{name}")
        theirs += [
            of(roles.ASSISTANT, thought).with_channel("analysis"),
            request.with_recipient(f"functions.{name}").with_content_type("json"),
            harmony.Message.from_author_and_content(author, output)
            .with_channel("commentary")
            .with_recipient("assistant"),
        ]
        made = call(str(number), name)
        made["function"]["arguments"] = arguments
        ours.append({"role": "assistant", "content": "", "thinking": thought, "tool_calls": [made]})
        ours.append({"role": "tool", "tool_call_id": str(number), "content": output})
    conversation = harmony.Conversation.from_messages(theirs)
    tokens = encoding.render_conversation_for_completion(conversation, roles.ASSISTANT)
    options: dict[str, Any] = {"reasoning_effort": effort}
    if has_tools:
        options["tools"] = [{"type": "function", "function": one} for one in SPECS]
    messages, options = adapt_conversation(ours, options)
    text = ChatTemplates({"default": TEMPLATE}, {}).render(messages, **options)
    assert text == encoding.decode_utf8(tokens)


# ---- detection


@pytest.mark.parametrize(
    ("calls", "thoughts", "template", "expected"),
    [
        ("auto", "auto", TEMPLATE, True),
        ("auto", "auto", "[TOOL_CALLS]", False),
        ("auto", "none", TEMPLATE, True),
        ("none", "auto", TEMPLATE, True),
        ("none", "none", TEMPLATE, False),
        ("mistral", "auto", TEMPLATE, False),
        ("auto", "openai_gptoss", "", True),
        ("openai", "none", "", True),
        ("openai", "openai_gptoss", "", True),
    ],
)
def test_settings_and_template_choose_harmony(calls, thoughts, template, expected):
    config = ServerConfig(tool_call_parser=calls, reasoning_parser=thoughts)
    assert (Parsers.choose(config).harmony_for(template) is HarmonyFormat) == expected


def test_named_format_of_calls_replaces_harmony():
    parsers = Parsers.choose(ServerConfig(tool_call_parser="mistral"))
    assert parsers.tool_format_for(TEMPLATE) is MistralFormat
    assert Parsers.choose(ServerConfig()).tool_format_for(TEMPLATE) is HarmonyFormat


@pytest.mark.parametrize("names", [("hermes", "openai_gptoss"), ("openai", "qwen3")])
def test_harmony_excludes_other_formats(names):
    calls, thoughts = names
    with pytest.raises(ConfigError, match="exclude each other"):
        Parsers.choose(ServerConfig(tool_call_parser=calls, reasoning_parser=thoughts))


# ---- conversations


def call(id: str, name: str = "note") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": f"of {id}"}


def test_each_call_has_its_own_message_and_result():
    user = {"role": "user", "content": "Do it."}
    both = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [call("1"), call("2")],
    }
    messages, _ = adapt_conversation([user, both, result("2"), result("1"), user], {})
    first = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.\n\nI look.",
        "tool_calls": [call("1")],
    }
    second = {"role": "assistant", "content": "", "tool_calls": [call("2")]}
    assert messages == [user, first, result("1"), second, result("2"), user]


def test_single_calls_and_plain_messages_stay_as_they_are():
    conversation = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call("1")]},
        result("1"),
        {"role": "assistant", "content": "Done.", "reasoning_content": "So."},
    ]
    assert adapt_conversation(conversation, {}) == (conversation, {})
    assert adapt_conversation([result("1")], {}) == ([result("1")], {})


def test_instructions_are_one_message_at_the_beginning():
    messages, _ = adapt_conversation(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi."},
            {"role": "developer", "content": "Be kind."},
        ],
        {},
    )
    assert messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hi."},
    ]


def test_functions_get_an_empty_description():
    bare, described = {"name": "a"}, {"name": "b", "description": "B"}
    tools = [{"type": "function", "function": one} for one in (bare, described)]
    _, options = adapt_conversation([], {"tools": tools, "other": 1})
    assert [tool["function"].get("description") for tool in options["tools"]] == ["", "B"]
    assert options["other"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reasoning_effort": "max"}, "must be low, medium or high for this model; got 'max'"),
        ({"builtin_tools": ["python"]}, "cannot set builtin_tools: this server runs neither"),
    ],
)
def test_options_that_the_model_lacks_are_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        adapt_conversation([], options)
