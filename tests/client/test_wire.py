from __future__ import annotations

import pytest

from toolkit.client.wire import EventBuffer, error_message

STREAM = (
    b'data: {"a": 1}\n\n: a comment\n\ndata:x\ndata: y\n\n'
    b"event: e\ndata: \xc3\xa9\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"x\ny", b"\xc3\xa9", b"[DONE]"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_do_not_depend_on_the_size_of_reads(size, newline):
    stream = STREAM.replace(b"\n", newline)
    buffer = EventBuffer()
    found = [e for i in range(0, len(stream), size) for e in buffer.feed(stream[i : i + size])]
    assert found == EVENTS


def test_event_is_returned_once_it_is_complete():
    buffer = EventBuffer()
    assert buffer.feed(b"data: half") == []
    assert buffer.feed(b" and half\n\n") == [b"half and half"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "No such model.", "code": 404}}', "No such model."),
        (b'{"object": "error", "message": "Too long."}', "Too long."),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'"text"', "text"),
        (b"<html>\n502 Bad\n Gateway", "<html> 502 Bad Gateway"),
        (b"", "the server gave no reason"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
    ],
)
def test_error_body_of_any_format_becomes_one_line(body, message):
    assert error_message(body) == message
