from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from toolkit.bench.wire import ServerError
from toolkit.chat.client import AnswerStats, ChatClient
from toolkit.chat.repl import converse, make_prompt
from toolkit.chat.session import Session
from toolkit.config.clients import ChatConfig


def said(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_an_answer_streams_to_stdout_and_its_speed_to_stderr(server, connect, screen):
    Session(connect(temperature=0.5, max_tokens=9), screen.terminal).handle("Hi")
    assert screen.answers == "Hello, wörld.\n"
    assert "42 tokens" in screen.talk
    assert "tok/s" in screen.talk
    assert server.bodies[0] | {"messages": None} == {
        "messages": None,
        "model": "fake",
        "temperature": 0.5,
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_history_goes_back_with_the_second_question(server, connect, screen):
    session = Session(connect(system="Be kind."), screen.terminal)
    session.handle("First")
    session.handle("Second")
    assert said(server.bodies[1]) == [
        ("system", "Be kind."),
        ("user", "First"),
        ("assistant", "Hello, wörld."),
        ("user", "Second"),
    ]


def interrupt_when(event):
    """Ctrl-C, as soon as the event has come and the client waits."""

    def wait() -> None:
        assert event.wait(20)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_ctrl_c_stops_the_answer_keeps_what_came_and_closes_the_connection(server, connect, screen):
    server.stall_after = 2
    session = Session(connect(), screen.terminal)
    thread = interrupt_when(server.stalled)
    session.handle("Go on for ever")
    thread.join()
    assert screen.answers == "Hello, \n"
    assert "stopped, ~2 tokens" in screen.talk
    assert server.disconnected.wait(20)

    server.stall_after = None
    session.handle("Again")
    assert ("assistant", "Hello, ") in said(server.bodies[1])
    assert screen.answers.endswith("Hello, wörld.\n")


def test_an_answer_stopped_before_it_began_leaves_the_question_to_ask_again(server, connect, screen):
    server.stall_after = 0
    session = Session(connect(), screen.terminal)
    thread = interrupt_when(server.stalled)
    session.handle("Hi")
    thread.join()
    assert session.conversation.turns == []
    server.stall_after = None
    session.handle("/regenerate")
    assert session.conversation.turns == [("Hi", "Hello, wörld.")]


def test_regenerate_replaces_the_last_answer(server, connect, screen):
    session = Session(connect(), screen.terminal)
    session.handle("One")
    session.handle("Two")
    server.pieces = ["Better."]
    session.handle("/regenerate")
    assert said(server.bodies[2]) == said(server.bodies[1])
    assert session.conversation.turns == [("One", "Hello, wörld."), ("Two", "Better.")]


def test_a_failed_regenerate_keeps_the_old_answer(server, connect, screen):
    session = Session(connect(), screen.terminal)
    session.handle("One")
    session.client.model = "gone"
    session.handle("/regenerate")
    session.handle("/regenerate")
    assert session.conversation.turns == [("One", "Hello, wörld.")]
    assert said(server.bodies[2]) == [("user", "One")]


def test_the_commands(server, connect, screen, tmp_path):
    session = Session(connect(), screen.terminal)
    session.handle("/regenerate")
    assert "nothing to answer again" in screen.talk
    session.handle("Hi")
    session.handle(f"/save {tmp_path / 'talk.txt'}")
    assert (tmp_path / "talk.txt").read_text() == "user: Hi\n\nassistant: Hello, wörld.\n"
    session.handle(f"/save {tmp_path / 'missing' / 'talk.txt'}")
    assert "Cannot write" in screen.talk
    session.handle("/new")
    assert session.conversation.turns == []
    session.handle("/system Be brief.")
    session.handle("Hi")
    assert said(server.bodies[-1]) == [("system", "Be brief."), ("user", "Hi")]
    session.handle("/systen")
    assert "Did you mean /system" in screen.talk
    assert session.handle("/help")
    assert not session.handle("/exit")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "other"}, r"refused \(HTTP 404\): No model other\."),
        ({"api_key": "wrong"}, r"wants another API key \(--api-key\): Invalid API key\."),
    ],
)
def test_a_refusal_is_one_line_and_the_conversation_goes_on(server, connect, screen, settings, message):
    server.api_key = "right"
    session = Session(connect(**{"api_key": "right"} | settings), screen.terminal)
    assert session.handle("Hi")
    assert re.search(message, screen.talk)
    assert len(screen.talk.strip().splitlines()) == 1
    assert screen.answers == ""


def test_a_server_that_is_not_there_is_one_line(screen, unused_tcp_port):
    client = ChatClient(f"http://127.0.0.1:{unused_tcp_port}", ChatConfig(), api_key=None, model="m")
    Session(client, screen.terminal).handle("Hi")
    assert f"No server answers at http://127.0.0.1:{unused_tcp_port}" in screen.talk
    with pytest.raises(ServerError, match="No server answers"):
        client.first_model()


def test_an_answer_that_breaks_off_is_kept_and_named(server, connect, screen):
    server.break_after = 2
    session = Session(connect(), screen.terminal)
    session.handle("Hi")
    assert session.conversation.turns == [("Hi", "Hello, ")]
    assert "broke" in screen.talk


def test_the_prompt_reads_until_ctrl_d(server, connect, screen, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys:
        keys.send_text("Hi\r")
        keys.send_text("\x03")  # Ctrl-C at an empty prompt
        keys.send_text("one\x1b\rtwo\r")  # Alt-Enter begins a new line
        keys.send_text("\x04")
        converse(Session(connect(), screen.terminal), make_prompt(keys, DummyOutput()))
    assert "Ctrl-D or /exit leaves." in screen.talk
    assert [said(body)[-1][1] for body in server.bodies] == ["Hi", "one\ntwo"]
    history = tmp_path / "tk" / "chat-history"
    assert "+Hi" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_control_characters_do_not_reach_a_terminal(screen):
    screen.out.isatty = lambda: True
    screen.terminal.piece("a\x1b[2Jb\x07\x9bc\n\td")
    assert screen.answers == "a[2Jbc\n\td"


def test_speed_is_counted_from_the_first_token():
    stats = AnswerStats(first=1.0, last=3.0, pieces=5, tokens=21)
    assert stats.line() == "21 tokens, 10.0 tok/s, first after 1.00 s"
    assert AnswerStats(first=1.0, last=1.0, pieces=1).line() == "~1 token, first after 1.00 s"
    assert AnswerStats().line() == ""
