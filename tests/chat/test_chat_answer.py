"""What a server sends, and what it adds up to."""

from __future__ import annotations

import pytest

from toolkit.chat.answer_view import Answer
from toolkit.chat.delta import Delta, PromptDetails, Usage, read_delta
from toolkit.chat.thinking import ThinkTags
from toolkit.client.wire import ServerError


def test_speed_is_counted_from_the_first_token():
    answer = Answer(first=1.0, last=3.0, pieces=5, usage=Usage(5, 21, PromptDetails(3)))
    assert answer.tokens_per_second == 10.0
    assert answer.stats() == "TTFT 1.00 s · 10.0 tok/s · in 5 (3 cached) · out 21"
    assert Answer(first=1.0, last=1.0, pieces=1).stats(100) == "TTFT 1.00 s · out ~1"
    assert Answer().stats() == ""


def test_the_time_that_was_thought_ends_with_the_first_word():
    answer = Answer()
    for delta in (
        Delta(reasoning="a"),
        Delta(reasoning="b"),
        Delta(content="c"),
        Delta(content="d"),
    ):
        answer.add(delta)
    assert answer.first <= answer.thought <= answer.last
    assert (answer.reasoning, answer.content, answer.pieces) == ("ab", "cd", 4)


WITH_THOUGHTS = "\n<think>\nIs 1 < 2? </thin> Yes.</think>\n\nYes, 1 < 2, and <think> is a tag."


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        (WITH_THOUGHTS, "\nIs 1 < 2? </thin> Yes.", "Yes, 1 < 2, and <think> is a tag."),
        ("No <think> here</think>", "", "No <think> here</think>"),
        ("<thi", "", "<thi"),
        (" <think>cut </th", "cut </th", ""),
        ("", "", ""),
    ],
)
def test_reasoning_in_tags_is_told_apart_however_it_is_cut(text, thought, said, size):
    tags, answer = ThinkTags(), Answer()
    for start in range(0, len(text), size):
        answer.add(tags.split(Delta(content=text[start : start + size])))
    answer.add(tags.rest())
    assert (answer.reasoning, answer.content) == (thought, said)


@pytest.mark.parametrize(
    "data",
    [
        b"no json",
        b"[]",
        b'{"choices": [{"delta": {"content": 5}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": 1000000000}]}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": -1}]}}]}',
        b'{"usage": "much"}',
    ],
)
def test_nonsense_from_a_server_is_one_line(data):
    with pytest.raises(ServerError, match="something unreadable"):
        read_delta(data)
    assert read_delta(b'{"choices": [], "usage": null}') == Delta()
