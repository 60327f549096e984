"""tk chat in a terminal: keys, signals and the screen."""

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
def start(server, monkeypatch, fork_server):
    """Function that starts `tk chat` with flags in a terminal."""
    running = []
    monkeypatch.delenv("NO_COLOR", raising=False)

    def begin(*flags: str, columns: int = 80, rows: int = 24, **environment: str) -> PtyProgram:
        module = "toolkit" if fork_server is None else "tests.chat.forked_tk"
        command = [sys.executable, "-m", module, "chat", *flags]
        environment = {"TK_URL": server.url} | environment
        program = PtyProgram(command, environment, columns, rows, fork_server)
        running.append(program)
        return program

    yield begin
    for program in running:
        program.close()


def questions(server):
    return [body["messages"][-1]["content"] for body in server.bodies]


def test_conversation_is_shown_saved_and_resumed(server, start):
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
    assert chat.is_restored
    assert "'tk chat --continue' resumes this conversation." in chat.text

    chat = start("--continue")
    chat.wait(PLACEHOLDER)
    assert (
        "Resuming a conversation of 2 questions, saved just now: What is it?\n"
        "> And then?\nTitle\n\nIt is bold:" in chat.text
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
    chat.wait(lambda: chat.process.poll() is not None or "again to leave" in chat.text)
    while chat.process.poll() is None:  # on a slow machine more than a second was between them
        shown = chat.raw.count(b"again to leave")
        chat.type(CTRL_C * 2)
        chat.wait(
            lambda least=shown + 1: (
                chat.process.poll() is not None or chat.raw.count(b"again to leave") > least
            )
        )
    assert chat.exit_code() == 130
    assert chat.is_restored


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_restores_the_terminal(server, start, number):
    server.stall_after = 2
    chat = start("Go on")
    chat.wait("Hello,")
    assert not chat.is_restored
    chat.process.send_signal(number)
    assert chat.exit_code() == 128 + number
    assert chat.is_restored


def test_question_of_several_lines_is_typed_or_pasted(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("one" + ESCAPE + ENTER + "two" + ENTER)
    chat.wait("out 42")
    chat.type("\x1b[200~def f():\n\treturn 1\n\x1b[201~")
    chat.wait("return 1")
    assert len(server.bodies) == 1  # the line breaks of pasted text do not send it
    chat.type(ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2)
    chat.type('"""/exit' + ENTER + 'x"""' + ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 3)
    assert questions(server) == ["one\ntwo", "def f():\n\treturn 1\n", "/exit\nx"]


def test_keys_typed_during_an_answer_go_to_the_next_question(server, start):
    resume = threading.Event()
    server.pieces = ["Hello, ", resume, "wörld."]
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("Go on" + ENTER)
    chat.wait("Hello,")
    # Bracketed paste is on.
    assert chat.raw.rfind(b"\x1b[?2004h") > chat.raw.rfind(b"\x1b[?2004l")
    chat.type("typed \x1b[200~and\npasted\x1b[201~ ahead")
    resume.set()
    chat.wait("out 42")
    assert "typed" not in chat.text.partition("out 42")[0]
    chat.wait("pasted ahead")
    chat.type(ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2)
    assert questions(server) == ["Go on", "typed and\npasted ahead"]


def test_keys_are_not_lost_between_answer_and_prompt(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    for number in range(1, 6):
        chat.type(f"question {number}" + ENTER)
        chat.wait(lambda count=number: chat.text.count("out 42") == count)
    chat.type(CTRL_D)
    assert chat.exit_code() == 0
    assert questions(server) == [f"question {number}" for number in range(1, 6)]


def test_commands_are_completed_by_any_of_their_letters(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("/ys")
    chat.wait("show or set the system message")
    chat.type("\t Be brief." + ENTER)
    chat.wait("The system message is set.")
    chat.type("no /command" + ENTER)
    chat.wait("out 42")
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_ctrl_r_finds_earlier_questions(server, start):
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


def test_edit_offers_the_question_and_ctrl_c_cancels(server, start):
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("first" + ENTER)
    chat.wait("out 42")
    chat.type("/edit" + ENTER)
    chat.wait(lambda: chat.text.count("> first") == 2)
    chat.type(CTRL_C)
    chat.wait("Edit cancelled.")
    chat.type("/edit" + ENTER)
    chat.wait(lambda: chat.text.count("> first") == 3)
    chat.type(" of all" + ENTER)
    chat.wait(lambda: chat.text.count("out 42") == 2)
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "first"}],
        [{"role": "user", "content": "first of all"}],
    ]


def test_reasoning_is_folded_and_shown_by_ctrl_t(server, start):
    resume = threading.Event()
    server.pieces = [
        {"reasoning_content": "Let me think about it. "},
        resume,
        {"reasoning_content": "Done."},
        "Yes.",
    ]
    chat = start()
    chat.wait(PLACEHOLDER)
    chat.type("Is it?" + ENTER)
    chat.wait("thinking")
    chat.wait("Let me think")
    resume.set()
    chat.wait("out 42")
    assert "Let me think" not in chat.text
    assert "▸ thought for" in chat.text
    chat.type(CTRL_T)
    chat.wait("Let me think about it. Done.")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, which suspends and resumes")
def test_ctrl_z_suspends_an_answer_until_fg(server, start, tmp_path):
    resume = threading.Event()
    server.pieces = ["before ", resume, "after"]
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
        resume.set()
        shell.wait("\nbefore after")
        shell.wait("out 42")
        shell.type("echo code $?" + ENTER)
        shell.wait("code 0")
    finally:
        shell.close()


def test_text_of_the_server_does_not_control_the_terminal(server, start):
    evil = "\x1b]0;owned\x07\x9b2J\u202e[bold]x[/]"
    call = {"index": 0, "id": "1", "function": {"name": evil, "arguments": evil}}
    server.models = [{"id": evil}]
    server.pieces = [{"reasoning": evil}, evil, {"tool_calls": [call]}, "never sent"]
    server.fail_after, server.error = 3, evil
    chat = start("--reasoning", "full", columns=160)
    chat.wait(PLACEHOLDER)
    for line in ("Hi", "/model", f"/model {evil[-1]}", "/show", "/show messages"):
        before = chat.raw.count(b"> ")
        chat.type(line + ENTER)
        chat.wait(lambda before=before: chat.raw.count(b"> ") > before)
    chat.type(CTRL_D)
    assert chat.exit_code() == 0
    assert chat.raw.count(b"[bold]x[/]") > 5
    assert chat.screen.title == ""
    written = chat.raw.decode()
    assert not [sign for sign in ("\x1b]", "\x07", "\x9b", "\u202e") if sign in written]


def test_no_color_turns_colors_off(server, start):
    server.pieces = ["`code` and **bold**\n\n```python\nx = 1  # remark\n```\n"]
    chat = start("What is it?", NO_COLOR="1")
    assert chat.exit_code() == 0
    assert "code and bold\n\n  x = 1  # remark" in chat.text
    colors = {char.fg for line in chat.screen.buffer.values() for char in line.values()}
    assert colors == {"default"}


def test_dumb_terminal_gets_plain_text(server, start):
    chat = start("What is it?", TERM="dumb")
    assert chat.exit_code() == 0
    assert chat.raw == "Hello, wörld.\r\n".encode()


def test_smaller_window_shows_the_rest_of_the_answer(server, start):
    resume = threading.Event()
    server.pieces = ["word " * 60, resume, "last"]
    chat = start("Go on", columns=120, COLUMNS="120", LINES="24")  # as exported by some shells
    chat.wait("word")
    chat.resize(60, 20)
    resume.set()
    assert chat.exit_code() == 0
    assert "word last" in " ".join(chat.text.split())
