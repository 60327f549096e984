"""The program on a terminal: keys, signals, and what is to be seen."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading

import pytest

from tests.chat.pty_program import CTRL_C, CTRL_D, CTRL_R, CTRL_T, CTRL_Z, ENTER, ESCAPE, PtyProgram

PROGRAM = "from toolkit.cli import main; main()"
PLACEHOLDER = "Ask something."


@pytest.fixture
def start(server, monkeypatch):
    """A function from flags to `tk chat` on a terminal."""
    running = []
    monkeypatch.delenv("NO_COLOR", raising=False)

    def begin(*flags: str, columns: int = 80, rows: int = 24, **environment: str) -> PtyProgram:
        command = [sys.executable, "-c", PROGRAM, "chat", *flags]
        program = PtyProgram(command, {"TK_URL": server.url} | environment, columns, rows)
        running.append(program)
        return program

    yield begin
    for program in running:
        program.close()


def questions(server):
    return [body["messages"][-1]["content"] for body in server.bodies]


def test_a_conversation(server, start):
    server.pieces = ["# Title\n\nIt is **bo", "ld**:\n\n- one\n", "- two\n"]
    chat = start()
    chat.wait(PLACEHOLDER)
    assert chat.text.startswith(f"fake at {server.url}")
    chat.type("What is it?" + ENTER)
    chat.wait("out 42")
    shown = "> What is it?\nTitle\n\nIt is bold:\n\n • one\n • two\nTTFT"
    assert shown in chat.text
    assert "*" not in chat.text
    chat.type("And then?" + ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2 and PLACEHOLDER in chat.text)
    assert questions(server) == ["What is it?", "And then?"]
    chat.type(CTRL_D)
    assert chat.exit_code() == 0
    assert chat.is_as_before
    assert "'tk chat --continue' goes on from here." in chat.text

    chat = start("--continue")
    chat.wait(PLACEHOLDER)
    assert (
        "Continuing the conversation of just now (2 questions): What is it?\n> And then?\nTitle\n\nIt is bold:"
        in chat.text
    )
    chat.type("More" + ENTER)
    chat.wait("out 42")
    assert [message["content"] for message in server.bodies[-1]["messages"]][::2] == [
        "What is it?",
        "And then?",
        "More",
    ]


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(server, start):
    server.stall_after = 2
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("Go on" + ENTER)
    chat.wait("Hello,")
    assert server.stalled.wait(90)
    chat.type(CTRL_C)
    assert server.disconnected.wait(90)
    chat.wait("stopped")
    chat.wait(PLACEHOLDER)
    chat.type(CTRL_C)
    chat.wait(lambda: chat.process.poll() is not None or "again leaves" in chat.text)
    while chat.process.poll() is None:  # a slow machine: more than a second lay between them
        shown = chat.raw.count(b"again leaves")
        chat.type(CTRL_C * 2)
        chat.wait(
            lambda least=shown + 1: (
                chat.process.poll() is not None or chat.raw.count(b"again leaves") > least
            )
        )  # called before the next
    assert chat.exit_code() == 130
    assert chat.is_as_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(server, start, number):
    server.stall_after = 2
    chat = start("Go on")
    chat.wait("Hello,")
    assert not chat.is_as_before
    chat.process.send_signal(number)
    assert chat.exit_code() == 128 + number
    assert chat.is_as_before


def test_a_question_of_several_lines_typed_and_pasted(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("one" + ESCAPE + ENTER + "two" + ENTER)
    chat.wait("out 42")
    chat.type("\x1b[200~def f():\n\treturn 1\n\x1b[201~")
    chat.wait("return 1")
    assert len(server.bodies) == 1  # the line breaks of a paste send nothing
    chat.type(ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2)
    assert questions(server) == ["one\ntwo", "def f():\n\treturn 1\n"]


def test_keys_that_are_pressed_during_an_answer_wait_for_the_next_question(server, start):
    goes_on = threading.Event()
    server.pieces = ["Hello, ", goes_on, "wörld."]
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("Go on" + ENTER)
    chat.wait("Hello,")
    assert chat.raw.rfind(b"\x1b[?2004h") > chat.raw.rfind(
        b"\x1b[?2004l"
    )  # the terminal is asked to mark pastes
    chat.type("typed \x1b[200~and\npasted\x1b[201~ ahead")
    goes_on.set()
    chat.wait("out 42")
    assert "typed" not in chat.text.partition("out 42")[0]
    chat.wait("pasted ahead")
    chat.type(ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2)
    assert questions(server) == ["Go on", "typed and\npasted ahead"]


def test_keys_are_never_lost_between_an_answer_and_the_prompt(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    for number in range(1, 6):
        chat.type(f"question {number}" + ENTER)
        chat.wait(lambda: chat.text.count("out 42") == number)  # noqa: B023  # called before the next number
    chat.type(CTRL_D)
    assert chat.exit_code() == 0
    assert questions(server) == [f"question {number}" for number in range(1, 6)]


def test_commands_are_completed_by_any_of_their_letters(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("/ys")
    chat.wait("shows or sets the system message")
    chat.type("\t Be brief." + ENTER)
    chat.wait("The system message is set.")
    chat.type("no /command" + ENTER)
    chat.wait("out 42")
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_earlier_questions_are_found_again(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    for question in ("What is a cache?", "Who are you?"):
        chat.type(question + ENTER)
        chat.wait(f"> {question}\nHello")
    chat.type(CTRL_R + "cach")
    chat.wait("search")
    chat.type(ENTER)
    chat.wait(lambda: "search" not in chat.text)
    assert len(server.bodies) == 2
    chat.type(ENTER)
    chat.wait(lambda: len(server.bodies) == 3)
    assert questions(server)[-1] == "What is a cache?"


def test_edit_puts_the_question_back_and_ctrl_c_leaves_all_as_it_was(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("first" + ENTER)
    chat.wait("out 42")
    chat.type("/edit" + ENTER)
    chat.wait(lambda: chat.text.count("> first") == 2)
    chat.type(CTRL_C)
    chat.wait("All stays as it was.")
    chat.type("/edit" + ENTER)
    chat.wait(lambda: chat.text.count("> first") == 3)
    chat.type(" of all" + ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2)
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "first"}],
        [{"role": "user", "content": "first of all"}],
    ]


def test_reasoning_is_folded_and_unfolded(server, start):
    goes_on = threading.Event()
    server.pieces = [
        {"reasoning_content": "Let me think about it. "},
        goes_on,
        {"reasoning_content": "Done."},
        "Yes.",
    ]
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("Is it?" + ENTER)
    chat.wait("thinking")
    chat.wait("Let me think")
    goes_on.set()
    chat.wait("out 42")
    assert "Let me think" not in chat.text
    assert "▸ thought for" in chat.text
    chat.type(CTRL_T)
    chat.wait("Let me think about it. Done.")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, which suspends and resumes")
def test_ctrl_z_suspends_an_answer_and_it_goes_on_afterwards(server, start, tmp_path):
    goes_on = threading.Event()
    server.pieces = ["before ", goes_on, "after"]
    (tmp_path / "tk").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{PROGRAM}" "$@"\n')
    (tmp_path / "tk").chmod(0o755)
    shell = PtyProgram(
        ["bash", "--norc", "--noprofile", "-i"],
        {"TK_URL": server.url, "PS1": "shell$ ", "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    try:
        shell.wait("shell$")
        shell.type("tk chat 'Go on'" + ENTER)
        shell.wait("\nbefore")
        shell.type(CTRL_Z)
        shell.wait("Stopped")
        shell.type("stty -a | grep -wo -- -icanon\\|-echo; echo sane" + ENTER)
        shell.wait("\nsane")
        assert "\n-icanon" not in shell.text
        assert "\n-echo" not in shell.text
        shell.type("fg" + ENTER)
        goes_on.set()
        shell.wait("\nbefore after")
        shell.wait("out 42")
        shell.type("echo code $?" + ENTER)
        shell.wait("code 0")
    finally:
        shell.close()


def test_without_color_there_is_none(server, start):
    server.pieces = ["`code` and **bold**\n\n```python\nx = 1  # remark\n```\n"]
    chat = start("What is it?", NO_COLOR="1")
    assert chat.exit_code() == 0
    assert "code and bold\n\n  x = 1  # remark" in chat.text
    colors = {char.fg for line in chat.screen.buffer.values() for char in line.values()}
    assert colors == {"default"}


def test_a_terminal_that_can_do_nothing_gets_plain_text(server, start):
    chat = start("What is it?", TERM="dumb")
    assert chat.exit_code() == 0
    assert chat.raw == "Hello, wörld.\r\n".encode()


def test_a_window_that_becomes_smaller_shows_the_rest_of_the_answer(server, start):
    goes_on = threading.Event()
    server.pieces = ["word " * 60, goes_on, "last"]
    chat = start("Go on", columns=120, COLUMNS="120", LINES="24")  # as shells export them
    chat.wait("word")
    chat.resize(60, 20)
    goes_on.set()
    assert chat.exit_code() == 0
    assert "word last" in " ".join(chat.text.split())
