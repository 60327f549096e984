"""The private server of a chat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.server import until
from toolkit.chat import local
from toolkit.chat.local import last_line, last_lines, local_server
from toolkit.chat.screen.starting import show_progress, ticking
from toolkit.client.wire import ServerError
from toolkit.logs import PROGRESS

SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["TK_API_KEY"].encode())
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("listening", flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tk"


def is_gone(url):
    """Return True once nothing answers at the URL; False after 30 seconds."""
    for _ in range(300):
        try:
            httpx.get(url, timeout=1.0)
        except httpx.HTTPError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_private_server_runs_inside_the_block(state, monkeypatch, manner):
    monkeypatch.setattr(local, "GRACE", 0.1)
    waits = []
    with local_server(
        None, tick=lambda *tick: waits.append(tick), command=[sys.executable, "-c", SERVER, manner]
    ) as server:
        assert httpx.get(server.url, timeout=60.0).text == server.api_key
        assert len(server.api_key) >= 24
        (log,) = state.iterdir()
        assert log.stat().st_mode & 0o077 == 0
        assert "listening" in log.read_text()
    assert waits
    assert is_gone(server.url)
    assert list(state.iterdir()) == []


def test_server_that_exits_shows_the_end_of_its_log(state):
    program = (
        "import sys; print('\\n'.join(f'line {i}' for i in range(50)))\n"
        "sys.exit('no such model: x')"
    )
    with (
        pytest.raises(
            ServerError, match=r"exit code 1(.|\n)*line 49(.|\n)*no such model: x"
        ) as caught,
        local_server("x", tick=lambda *_: None, command=[sys.executable, "-c", program]),
    ):
        pass
    assert "line 20" not in caught.value.message
    assert len(list(state.iterdir())) == 1  # the log stays


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_private_server_ends_with_the_chat(number):
    program = f"""
import signal, sys, time
from toolkit.chat.local import local_server, exit_on_signals
command = [sys.executable, "-c", {SERVER!r}]
signals = exit_on_signals(signal.SIGTERM, signal.SIGHUP)
with signals, local_server(None, tick=lambda *_: None, command=command) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as chat:
        url = chat.stdout.readline().strip()
        assert httpx.get(url, timeout=60.0).status_code == 200
        os.kill(chat.pid, number)
        chat.wait(90)
    assert is_gone(url)


def test_progress_shows_the_last_line_of_the_log(screen, monkeypatch, tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n" + "x" * 500 + "\nweights \x1b[1m 38%\nnot comp")
    assert last_line(log) == "weights \x1b[1m 38%"
    with show_progress(screen.terminal, "Starting m") as tick:
        for seconds in (0.0, 29.0, 30.0, 31.0, 60.0):
            tick(seconds, last_line(log))
    assert screen.stderr.splitlines() == [
        "Starting m ...",
        "Starting m ... 30 s  weights \\x1b[1m 38%",
        "Starting m ... 60 s  weights \\x1b[1m 38%",
    ]


def test_progress_of_this_process_is_shown():
    ticks = []
    with ticking(lambda *tick: ticks.append(tick)):
        PROGRESS.info("weights %d%%", 38)
        until(lambda: ticks and ticks[-1][1] == "weights 38%")
    assert PROGRESS.disabled


def test_last_lines_of_an_empty_log(tmp_path):
    (tmp_path / "log").touch()
    assert last_line(tmp_path / "log") == ""
    assert last_lines(tmp_path / "log") == "(empty)"
