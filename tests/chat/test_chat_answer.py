"""Parsing of deltas, and the answer that they add up to."""

from __future__ import annotations

import pytest

from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.answers.delta import ChatDelta, PromptDetails, Usage, parse_delta
from toolkit.chat.answers.thinking import ThinkTagSplitter
from toolkit.client.wire import ServerError


def test_answer_speed_counts_from_the_first_token():
    answer = Answer(
        first_token=1.0, last_token=3.0, num_deltas=5, usage=Usage(5, 21, PromptDetails(3))
    )
    assert answer.tokens_per_second == 10.0
    assert answer.stats() == "TTFT 1.00 s · 10.0 tok/s · in 5 (3 cached) · out 21"
    answer = Answer(first_token=1.0, last_token=1.0, num_deltas=1)
    assert answer.stats(100) == "TTFT 1.00 s · out ~1"
    assert Answer().stats() == ""


def test_answer_reasoning_time_ends_with_the_first_content():
    answer = Answer()
    for delta in (
        ChatDelta(reasoning="a"),
        ChatDelta(reasoning="b"),
        ChatDelta(content="c"),
        ChatDelta(content="d"),
    ):
        answer.add(delta)
    assert answer.first_token <= answer.reasoning_end <= answer.last_token
    assert (answer.reasoning, answer.content, answer.num_deltas) == ("ab", "cd", 4)


WITH_REASONING = "\n<think>\nIs 1 < 2? </thin> Yes.</think>\n\nYes, 1 < 2, and <think> is a tag."


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (WITH_REASONING, "\nIs 1 < 2? </thin> Yes.", "Yes, 1 < 2, and <think> is a tag."),
        ("No <think> here</think>", "", "No <think> here</think>"),
        ("<thi", "", "<thi"),
        (" <think>cut </th", "cut </th", ""),
        ("", "", ""),
    ],
)
def test_think_tags_split_reasoning_in_deltas_of_any_size(text, reasoning, content, size):
    splitter, answer = ThinkTagSplitter(), Answer()
    for start in range(0, len(text), size):
        answer.add(splitter.split(ChatDelta(content=text[start : start + size])))
    answer.add(splitter.flush())
    assert (answer.reasoning, answer.content) == (reasoning, content)


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
def test_invalid_data_from_a_server_is_an_error(data):
    with pytest.raises(ServerError, match="invalid data"):
        parse_delta(data)
    assert parse_delta(b'{"choices": [], "usage": null}') == ChatDelta()
