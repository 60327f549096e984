from __future__ import annotations

import asyncio
import os
import re
import signal
import threading

import orjson
import pytest

from tests.chat.fake_server import said
from toolkit.chat import store
from toolkit.chat.client import Address, ChatClient, ModelCard
from toolkit.chat.commands import handle_line
from toolkit.chat.screen.signals import Signals
from toolkit.chat.screen.terminal import Keyboard
from toolkit.chat.session import Session
from toolkit.client.wire import ServerError
from toolkit.config.clients import ChatConfig


def kept(session):
    return said({"messages": session.conversation.messages})


async def test_an_answer_goes_to_stdout_and_its_numbers_to_stderr(server, connect, screen):
    begun = threading.Event()
    server.pieces.insert(1, begun)
    server.pieces.insert(2, 0.05)

    async def until_begun() -> None:
        while not screen.answers:
            await asyncio.sleep(0.01)
        begun.set()

    await asyncio.gather(
        handle_line(connect(temperature=0.5, top_p=0.9, max_tokens=9, seed=7), "Hi"), until_begun()
    )
    assert screen.answers == "Hello, wörld.\n"
    assert re.search(
        r"TTFT \d+\.\d\d s · [\d,.]+ tok/s · in 5 \(3 cached\) · out 42 · context 47/100 \(47%\)",
        screen.talk,
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


async def test_an_answer_that_is_not_streamed_is_the_same(server, connect, screen):
    await handle_line(connect(stream=False), "Hi")
    assert screen.answers == "Hello, wörld.\n"
    assert "out 42" in screen.talk
    assert "tok/s" not in screen.talk  # there is no first token to count from
    assert server.bodies[0]["stream"] is False


async def test_the_history_goes_back_with_the_second_question(server, connect, screen):
    server.pieces = [{"reasoning_content": "Hm."}, "Hello."]
    session = connect(system="Be kind.")
    await handle_line(session, "First")
    await handle_line(session, "//Second")
    assert said(server.bodies[1]) == [
        ("system", "Be kind."),
        ("user", "First"),
        ("assistant", "Hello."),
        ("user", "/Second"),
    ]
    assert "Hm." not in str(server.bodies[1])  # what was thought stays here
    await handle_line(session, "/etc/hosts is a file")
    assert said(server.bodies[2])[-1] == ("user", "/etc/hosts is a file")


async def interrupt_when(event):
    """Ctrl-C, as soon as the event has come and the client waits."""
    assert await asyncio.to_thread(event.wait, 20)
    os.kill(os.getpid(), signal.SIGINT)


async def test_ctrl_c_stops_the_answer_keeps_what_came_and_closes_the_connection(
    server, connect, screen
):
    server.stall_after = 2
    session = connect()
    await asyncio.gather(handle_line(session, "Go on for ever"), interrupt_when(server.stalled))
    assert screen.answers == "Hello, \n"
    assert "stopped · TTFT" in screen.talk
    assert "out ~2" in screen.talk
    assert await asyncio.to_thread(server.disconnected.wait, 20)
    assert not session.signals.leave

    server.stall_after = None
    await handle_line(session, "Again")
    assert ("assistant", "Hello, ") in said(server.bodies[1])
    assert screen.answers.endswith("Hello, wörld.\n")


def test_a_second_ctrl_c_leaves_within_a_second_and_no_later():
    signals = Signals(Keyboard())
    for now, leaves in ((10.0, False), (11.5, False), (12.4, True)):
        signals.press(now)
        assert signals.leave is leaves


async def test_an_answer_stopped_before_it_began_leaves_the_question_to_ask_again(
    server, connect, screen
):
    server.stall_after = 0
    session = connect()
    await asyncio.gather(handle_line(session, "Hi"), interrupt_when(server.stalled))
    assert kept(session) == []
    server.stall_after = None
    await handle_line(session, "/retry")
    assert kept(session) == [("user", "Hi"), ("assistant", "Hello, wörld.")]


async def test_a_full_disk_is_one_line(server, connect, screen, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", full)
    assert await handle_line(connect(), "Hi")
    assert "The conversation is not saved: No space left on device" in screen.talk


async def test_a_tool_that_is_called_is_shown_and_its_result_asked_for(
    server, connect, screen, tmp_path
):
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
    assert 'get_weather({"city": "Paris"})' in screen.talk
    assert session.open_call["function"]["name"] == "get_weather"
    server.pieces = ["It is mild."]
    await handle_line(session, "18 degrees")
    assert session.open_call["function"]["name"] == "get_time"
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
    assert kept(session) == []


async def test_reasoning_is_kept_apart_and_shown_when_asked_for(server, connect, screen):
    server.pieces = [{"reasoning": "First, "}, {"reasoning_content": "think."}, "Yes."]
    session = connect()
    await handle_line(session, "/show reasoning")
    assert "has no reasoning" in screen.talk
    await handle_line(session, "Is it?")
    assert screen.answers == "Yes.\n"
    await handle_line(session, "/show reasoning")
    assert "First, think." in screen.talk


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "other"}, r"refused \(HTTP 404\): No model other\."),
        ({"api_key": "wrong"}, r"wants another API key \(--api-key\): Invalid API key\."),
    ],
)
async def test_a_refusal_is_one_line_and_the_conversation_goes_on(
    server, connect, screen, settings, message
):
    server.api_key = "right"
    session = connect(**{"api_key": "right"} | settings)
    assert await handle_line(session, "Hi")
    assert re.search(message, screen.talk)
    assert len(screen.talk.strip().splitlines()) == 1
    assert screen.answers == ""


async def test_a_server_that_is_not_there_is_one_line(screen, unused_tcp_port):
    client = ChatClient(Address(f"http://127.0.0.1:{unused_tcp_port}"))
    await handle_line(Session(client, ModelCard("m"), ChatConfig(), screen.terminal), "Hi")
    assert f"No server answers at http://127.0.0.1:{unused_tcp_port}" in screen.talk
    with pytest.raises(ServerError, match="No server answers"):
        client.address.models()
    await client.close()


@pytest.mark.parametrize(
    ("how", "message"), [("break_after", "broke off"), ("fail_after", "The engine died.")]
)
async def test_an_answer_that_breaks_off_is_kept_and_the_conversation_goes_on(
    server, connect, screen, how, message
):
    setattr(server, how, 2)
    session = connect()
    await handle_line(session, "Hi")
    assert kept(session) == [("user", "Hi"), ("assistant", "Hello, ")]
    assert message in screen.talk
    setattr(server, how, None)
    await handle_line(session, "Go on")
    assert screen.answers == "Hello, \nHello, wörld.\n"


async def test_a_form_that_cannot_be_read_is_one_line(connect, screen, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    session = connect()
    await handle_line(session, f"/set schema {tmp_path / 'list.json'}")
    await handle_line(session, "Hi")
    assert "holds no object" in screen.talk.replace("\n", " ")
    await handle_line(session, "/set schema /missing.json")
    await handle_line(session, "Hi")
    assert "cannot read /missing.json" in screen.talk.replace("\n", " ")
