"""The command as a program, with pipes at both ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = "from toolkit.cli import main; main()"


@pytest.fixture
def tk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(*flags: str, stdin: str = "Hi\nthere\n") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, "chat", *flags]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_the_whole_of_stdin_is_one_message_and_stdout_is_the_answer(server, tk):
    done = tk("--url", server.url, "--system", "Be brief.")
    assert (done.returncode, done.stdout) == (0, "Hello, wörld.\n")
    assert [message["content"] for message in server.bodies[0]["messages"]] == ["Be brief.", "Hi\nthere"]


def test_the_key_comes_from_the_environment(server, tk, monkeypatch):
    server.api_key = "right"
    monkeypatch.setenv("TK_API_KEY", "right")
    monkeypatch.setenv("TK_URL", server.url)
    assert tk().stdout == "Hello, wörld.\n"


def test_errors_are_one_line_on_stderr(server, tk, unused_tcp_port):
    for flags, message in (
        (("other", "--url", server.url), "No model other."),
        (("--url", f"127.0.0.1:{unused_tcp_port}"), "No server answers at"),
    ):
        done = tk(*flags)
        assert done.returncode == 2
        assert done.stdout == ""
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert "no message" in tk("--url", server.url, stdin="  \n").stderr


def test_a_reader_that_goes_away_is_no_error(server, tk):
    server.pieces = ["word "] * 20_000
    command = f"{sys.executable} -c '{PROGRAM}' chat --url {server.url} | head -c 5"
    done = subprocess.run(
        ["bash", "-c", command], input="Hi", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "word "
    assert done.stderr == ""
