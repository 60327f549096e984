"""Sessions: questions, answers, tools, errors and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading

import orjson
import pytest

from tests.chat.fake_server import messages_of
from toolkit.chat import store
from toolkit.chat.answers.client import Address, ChatClient, ModelInfo
from toolkit.chat.commands import handle_line
from toolkit.chat.screen.signals import Signals
from toolkit.chat.screen.terminal import Keyboard
from toolkit.chat.session import Session
from toolkit.client.wire import ServerError
from toolkit.config.clients import ChatConfig


def history(session):
    """Return (role, content) of each message of the conversation."""
    return messages_of({"messages": session.conversation.messages})


async def test_answer_goes_to_stdout_and_stats_to_stderr(server, connect, screen):
    has_begun = threading.Event()
    server.pieces.insert(1, has_begun)
    server.pieces.insert(2, 0.05)

    async def until_begun() -> None:
        while not screen.stdout:
            await asyncio.sleep(0.01)
        has_begun.set()

    await asyncio.gather(
        handle_line(connect(temperature=0.5, top_p=0.9, max_tokens=9, seed=7), "Hi"), until_begun()
    )
    assert screen.stdout == "Hello, wörld.\n"
    assert re.search(
        r"TTFT \d+\.\d\d s · [\d,.]+ tok/s · in 5 \(3 cached\) · out 42 · context 47/100 \(47%\)",
        screen.stderr,
    )
    assert server.bodies[0] | {"messages": None} == {
        "messages": None,
        "model": "fake",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_answer_without_streaming_is_the_same(server, connect, screen):
    await handle_line(connect(stream=False), "Hi")
    assert screen.stdout == "Hello, wörld.\n"
    assert "out 42" in screen.stderr
    assert "tok/s" not in screen.stderr  # no first token to count from
    assert server.bodies[0]["stream"] is False


async def test_second_question_sends_the_history(server, connect, screen):
    server.pieces = [{"reasoning_content": "Hm."}, "Hello."]
    session = connect(system="Be kind.")
    await handle_line(session, "First")
    await handle_line(session, "//Second")
    assert messages_of(server.bodies[1]) == [
        ("system", "Be kind."),
        ("user", "First"),
        ("assistant", "Hello."),
        ("user", "/Second"),
    ]
    assert "Hm." not in str(server.bodies[1])  # reasoning is not sent
    await handle_line(session, "/etc/hosts is a file")
    assert messages_of(server.bodies[2])[-1] == ("user", "/etc/hosts is a file")


async def interrupt_when(event):
    """Send SIGINT once the event is set."""
    assert await asyncio.to_thread(event.wait, 20)
    os.kill(os.getpid(), signal.SIGINT)


async def test_ctrl_c_keeps_the_partial_answer_and_disconnects(server, connect, screen):
    server.stall_after = 2
    session = connect()
    await asyncio.gather(handle_line(session, "Go on for ever"), interrupt_when(server.stalled))
    assert screen.stdout == "Hello, \n"
    assert "stopped · TTFT" in screen.stderr
    assert "out ~2" in screen.stderr
    assert await asyncio.to_thread(server.disconnected.wait, 20)
    assert not session.signals.should_leave

    server.stall_after = None
    await handle_line(session, "Again")
    assert ("assistant", "Hello, ") in messages_of(server.bodies[1])
    assert screen.stdout.endswith("Hello, wörld.\n")


def test_second_ctrl_c_leaves_only_within_a_second():
    signals = Signals(Keyboard())
    for now, leaves in ((10.0, False), (11.5, False), (12.4, True)):
        signals.count_ctrl_c(now)
        assert signals.should_leave is leaves


async def test_question_stopped_before_its_answer_can_be_retried(server, connect, screen):
    server.stall_after = 0
    session = connect()
    await asyncio.gather(handle_line(session, "Hi"), interrupt_when(server.stalled))
    assert history(session) == []
    server.stall_after = None
    await handle_line(session, "/retry")
    assert history(session) == [("user", "Hi"), ("assistant", "Hello, wörld.")]


async def test_full_disk_is_one_line(server, connect, screen, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", full)
    assert await handle_line(connect(), "Hi")
    assert "Cannot save the conversation: No space left on device" in screen.stderr


async def test_tool_calls_are_shown_and_get_results(server, connect, screen, tmp_path):
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    ]
    (tmp_path / "tools.json").write_bytes(orjson.dumps(tools))
    session = connect(tools=str(tmp_path / "tools.json"))
    server.pieces = [
        "Let me see.",
        {
            "tool_calls": [
                {"index": 0, "id": "a", "function": {"name": "get_weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "b", "function": {"name": "get_time", "arguments": "{}"}}
            ]
        },
    ]
    await handle_line(session, "How is Paris?")
    assert server.bodies[0]["tools"] == tools
    assert 'get_weather({"city": "Paris"})' in screen.stderr
    assert session.pending_call["function"]["name"] == "get_weather"
    server.pieces = ["It is mild."]
    await handle_line(session, "18 degrees")
    assert session.pending_call["function"]["name"] == "get_time"
    assert len(server.bodies) == 1
    await handle_line(session, "noon")
    assistant, *results = server.bodies[1]["messages"][1:]
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "a", "content": "18 degrees"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
    await handle_line(session, "/undo")
    assert history(session) == []


async def test_reasoning_is_separate_and_shown_on_request(server, connect, screen):
    server.pieces = [{"reasoning": "First, "}, {"reasoning_content": "think."}, "Yes."]
    session = connect()
    await handle_line(session, "/show reasoning")
    assert "has no reasoning" in screen.stderr
    await handle_line(session, "Is it?")
    assert screen.stdout == "Yes.\n"
    await handle_line(session, "/show reasoning")
    assert "First, think." in screen.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "other"}, r"refused the request \(HTTP 404\): No model other\."),
        (
            {"api_key": "wrong"},
            r"rejected the API key \(--api-key or TK_API_KEY\): Invalid API key\.",
        ),
    ],
)
async def test_refusal_is_one_line_and_does_not_end_the_chat(
    server, connect, screen, settings, message
):
    server.api_key = "right"
    session = connect(**{"api_key": "right"} | settings)
    assert await handle_line(session, "Hi")
    assert re.search(message, screen.stderr)
    assert len(screen.stderr.strip().splitlines()) == 1
    assert screen.stdout == ""


@pytest.mark.parametrize(
    ("uds", "message"),
    [
        (None, "No server answers at http://127.0.0.1:"),
        ("/no.sock", "The private server has ended."),
    ],
)
async def test_missing_server_is_one_line(screen, unused_tcp_port, uds, message):
    client = ChatClient(Address(f"http://127.0.0.1:{unused_tcp_port}", uds=uds))
    await handle_line(Session(client, ModelInfo("m"), ChatConfig(), screen.terminal), "Hi")
    assert message in screen.stderr
    with pytest.raises(ServerError, match=message):
        client.address.list_models()
    await client.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [("break_after", "Lost the connection"), ("fail_after", "The engine died.")],
)
async def test_incomplete_answer_is_kept(server, connect, screen, setting, message):
    setattr(server, setting, 2)
    session = connect()
    await handle_line(session, "Hi")
    assert history(session) == [("user", "Hi"), ("assistant", "Hello, ")]
    assert message in screen.stderr
    setattr(server, setting, None)
    await handle_line(session, "Go on")
    assert screen.stdout == "Hello, \nHello, wörld.\n"


async def test_unreadable_schema_is_one_line(connect, screen, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    session = connect()
    await handle_line(session, f"/set schema {tmp_path / 'list.json'}")
    await handle_line(session, "Hi")
    assert "is not a JSON object" in screen.stderr.replace("\n", " ")
    await handle_line(session, "/set schema /missing.json")
    await handle_line(session, "Hi")
    assert "cannot read /missing.json" in screen.stderr.replace("\n", " ")
