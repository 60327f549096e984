"""Strings of a hostile server do not control the terminal, in no command and no message."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.panel import Panel
from rich.text import Text

import toolkit
from tests.top.screens import screen_text
from toolkit.cli.root import run
from toolkit.console import SafeConsole
from toolkit.top.app import TopApp
from toolkit.top.readings.source import HTTPSource
from toolkit.top.state import State

EVIL = "\x1b]52;c;cHduZWQ=\x07\x1b]0;owned\x1b\\\x1b[2J\x1bcx\x9b31m\x7f\b\v\u202e[bold]e[/]v"
CALL = {"index": 0, "id": EVIL, "function": {"name": EVIL, "arguments": EVIL}}
ANSWER = "\n".join(
    "data: " + json.dumps(event) + "\n"
    for event in (
        {"choices": [{"text": EVIL, "delta": {"content": EVIL}}]},
        {"choices": [{"delta": {"tool_calls": [CALL]}}]},
        {"error": {"message": EVIL}},
    )
)
METRICS = "".join(
    f'tk:{name}{{model_name="{EVIL}",finished_reason="{EVIL}",{label}="{EVIL}"}} 1\n'
    for name, label in (
        ("num_requests_running", "x"),
        ("request_success_total", "y"),
        ("build_info", "version"),
    )
)
LIVE = {"id": EVIL, "state": EVIL, "origin": EVIL, "age": 1.0, "num_prompt_tokens": 1}
PAGES = {
    "/health": {},
    "/v1/models": {"data": [{"id": EVIL}]},
    "/version": {"version": EVIL},
    "/server_info": {
        "version": EVIL,
        "models": [{"model": EVIL, "engine": {EVIL: {EVIL: EVIL}}, "device": {EVIL: EVIL}}] * 2,
    },
    "/tk/requests": {"requests": [LIVE]},
    "/metrics": METRICS,
    "/v1/completions": ANSWER,
    "/v1/chat/completions": ANSWER,
}


class Server(ThreadingHTTPServer):
    """Answers with PAGES, except for what `broken` says: refuse, garbage, invalid."""

    broken = ""
    lists_models = True  # also if it is broken


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        page, status = PAGES[self.path], 200
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not (self.server.lists_models and self.path == "/v1/models"):
            if self.server.broken == "refuse":
                page, status = {"error": {"message": EVIL}}, 500
            elif self.server.broken == "invalid":
                page = f"data: {EVIL}\n\n"
            elif self.server.broken == "garbage":
                self.wfile.write(f"HTTP/1.1 2x0 {EVIL}\r\n\r\n".encode())
                self.close_connection = True
                return
        body = (page if isinstance(page, str) else json.dumps(page)).encode()
        self.send_response(status)
        self.send_header("Server", "x\x9b31m\u00ad")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815  (http.server's name)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hostile() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def tk(hostile, frozen_heap, monkeypatch, tmp_path):
    """Function that runs a command in a terminal and returns all that it wrote there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TK_URL", f"http://127.0.0.1:{hostile.server_port}")
    monkeypatch.chdir(tmp_path)

    def run_in_terminal(*words: str) -> str:
        master, slave = pty.openpty()
        written = [b""]

        def read() -> None:
            while not written[-1].endswith(b"\0"):
                written.append(os.read(master, 65536))

        reader = threading.Thread(target=read)
        reader.start()
        with monkeypatch.context() as patch:
            for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
                patch.setattr(sys, name, os.fdopen(slave, mode, closefd=False))
            patch.setattr(sys, "argv", ["tk", *words])
            try:
                run()
                sys.stdout.flush()
            finally:
                os.write(slave, b"\0")
                reader.join()
        os.close(slave)
        os.close(master)
        return b"".join(written)[:-1].decode()

    return run_in_terminal


BENCH = "bench --num-prompts 2 --max-concurrency 2 --num-warmups 0"
COMMANDS = (
    "top --once --interval 0.1",
    BENCH,
    f"{BENCH} --endpoint chat",
    f"{BENCH} --find-max-rps --goodput ttft:100 --request-rate 50",
    "bench sweep --num-prompts 1 --num-warmups 0 --vary max-concurrency=1",
    "chat --prompt hi",
)


FAULTS = (("refuse", False), ("invalid", True), ("garbage", True))
"""Faults that commands with the same requests meet in the same place."""


def assert_harmless(written: str) -> None:
    """Fail if the terminal got a control sequence of EVIL."""
    for sign in ("\x1b]", "\x1b[2J", "\x1bc", *"\x07\x08\x0b\x7f\x9b\u202e"):
        assert sign not in written, (sign, written)


@pytest.mark.parametrize(
    ("words", "broken", "lists_models"),
    [
        *((words, broken, True) for words in COMMANDS for broken in ("", "refuse")),
        *((words, *how) for words in (COMMANDS[0], BENCH, COMMANDS[-1]) for how in FAULTS),
    ],
)
def test_server_text_does_not_control_the_terminal(tk, hostile, words, broken, lists_models):
    hostile.broken, hostile.lists_models = broken, lists_models
    assert_harmless(tk(*words.split()))


@pytest.mark.parametrize("words", [COMMANDS[0], BENCH, COMMANDS[-1]])
def test_markup_in_server_text_is_shown_as_it_is(tk, hostile, words):
    hostile.broken = ""
    assert "[bold]e[/]v" in tk(*words.split()).replace("\r\n", "")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("top --json --interval 0.1", ("servers", 0, "model")),
        (f"{BENCH} --json", ("server", "model")),
        ("chat --prompt hi --json", ("content",)),
    ],
)
def test_json_keeps_server_text_and_escapes_it(tk, hostile, words, key):
    hostile.broken = ""
    written = tk(*words.split())
    found = json.loads(written[written.index("{\r\n") : written.rindex("}") + 1])
    for each in key:
        found = found[each]
    assert found == EVIL
    assert_harmless(written)


def test_answer_of_a_local_model_does_not_control_the_terminal(tk, monkeypatch):
    class Model:
        tokenizer, info = None, SimpleNamespace(max_model_len=100)
        tokenize = stream = lambda *_, **__: [SimpleNamespace(text=EVIL, token_ids=[1])]

    monkeypatch.setitem(sys.modules, "toolkit.engine.llm", SimpleNamespace(LLM=lambda **_: Model()))
    written = tk("run", "--prompt", "hi")
    assert_harmless(written)
    assert "[bold]e[/]v" in written


def test_every_console_is_a_safe_one():
    for path in Path(toolkit.__file__).parent.rglob("*.py"):
        assert not re.search(r"\bConsole\(", path.read_text()) or path.name == "console.py", path


@pytest.mark.parametrize("broken", ["", "refuse"])
async def test_server_text_does_not_control_the_dashboard(broken):
    def answer(request: httpx.Request) -> httpx.Response:
        if broken == "refuse" or request.method == "DELETE":
            return httpx.Response(500, json={"error": {"message": EVIL}})
        page = PAGES[request.url.path]
        return httpx.Response(200, **{"text" if isinstance(page, str) else "json": page})

    source = HTTPSource("http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    app = TopApp(State([source], interval=0.1, window=30.0))
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        seen = ""
        while "[bold]e[/]v" not in screen_text(app):
            await pilot.pause(0.01)
        for keys in ("1", "3", "4", "5", "2", "x", "enter"):
            await pilot.press(keys)
            await pilot.pause()
            seen += screen_text(app)
        while not (broken or app.query("Toast")):  # the request could not be cancelled
            await pilot.pause(0.01)
        seen += screen_text(app)
        await pilot.press("enter")
        await pilot.pause()
        seen += screen_text(app)
    assert_harmless(seen)
    assert "[bold]e[/]v" in seen


@pytest.mark.parametrize("wrap", [str, Text, Panel, lambda text: Panel("", title=Text(text))])
def test_console_shows_strings_as_they_are_written(wrap):
    console = SafeConsole(file=io.StringIO(), width=200, force_terminal=True)
    console.print(wrap(f"a {EVIL} b"))
    written = console.file.getvalue()
    assert_harmless(written)
    assert r"a \x1b]52;c;cHduZWQ=" in written
    assert r"\u202e[bold]e[/]v b" in written
