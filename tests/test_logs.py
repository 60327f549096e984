"""Log lines of a process whose stderr takes them slowly, later or never."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.server import until
from toolkit import logs
from toolkit.logs import LogQueue

PROGRAM = """
import logging, os, sys
from toolkit import logs
style, end, size = sys.argv[1:]
logs.FLUSH_TIMEOUT = 0.1 if size == "5000" else 20.0
logs.LogStyle("info", json=style == "json").apply()
for number in range(500):
    logging.getLogger("toolkit").info("line %d %s", number, "x" * int(size))
print("the card", file=sys.stderr)
if end == "os._exit":
    logs.flush_stderr()
    os._exit(1)
raise ValueError("the last words")
"""


@contextlib.contextmanager
def unread_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def notice(count: int) -> str:
    return f"{count} dropped\n"


def fill(queue: LogQueue, condition: Callable[[], bool]) -> int:
    """Write numbered lines of 1,000 bytes until the condition is true. Return their number."""
    number = 0
    while not condition():
        assert queue.write(b"%06d%s\n" % (number, b"x" * 993)) == 1000
        number += 1
    return number


def read_until(reader: int, end: bytes) -> list[bytes]:
    data = b""
    while not data.endswith(end):
        data += os.read(reader, 2**16)
    return data.splitlines()


def test_full_pipe_drops_lines_and_reports_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_BYTES", 50_000)
    with unread_pipe() as (reader, writer):
        queue = LogQueue(writer, notice)
        count = fill(queue, lambda: queue.num_dropped == 20)
        lines = read_until(reader, b" dropped\n")
        assert [int(line[:6]) for line in lines[:-1]] == list(range(count - 20))
        assert lines[-1] == b"20 dropped"
        queue.write(b"another\n")
        assert read_until(reader, b"another\n") == [b"another"]


def test_failing_stderr_drops_lines_until_it_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "RETRY_INTERVAL", 0.01)
    with unread_pipe() as (reader, writer), open("/dev/full", "wb") as full:
        descriptor = os.dup(full.fileno())
        queue = LogQueue(descriptor, notice)
        for _ in range(3):
            queue.write(b"a line\n")
        until(lambda: queue.num_dropped == 3)
        os.dup2(writer, descriptor)
        assert read_until(reader, b" dropped\n") == [b"3 dropped"]
        queue.write(b"another\n")
        assert read_until(reader, b"another\n") == [b"another"]
        os.close(descriptor)


def test_pipe_without_blocking_writes_gets_all_lines() -> None:
    """Some parents make a pipe non-blocking, for all processes that have it."""
    with unread_pipe() as (reader, writer):
        os.set_blocking(writer, False)
        queue = LogQueue(writer, notice)
        for number in range(200):
            queue.write(b"%06d%s\n" % (number, b"x" * 993))
        lines = read_until(reader, b"000199" + b"x" * 993 + b"\n")
        assert [int(line[:6]) for line in lines] == list(range(200))


def run(style: str, end: str, size: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, style, end, str(size)], stderr=stderr)


@pytest.mark.parametrize(
    ("style", "end", "last"),
    [("text", "exception", "ValueError: the last words"), ("json", "os._exit", "the card")],
)
def test_last_lines_are_written_before_the_exit(style: str, end: str, last: str) -> None:
    with run(style, end, 1000, subprocess.PIPE) as process:
        lines = process.stderr.read().decode().splitlines()
    assert lines[-1] == last
    assert lines[500] == "the card"
    logged = lines[:500]
    if style == "json":
        logged = [json.loads(line)["message"] for line in logged]
    assert all(f"line {number} " in line for number, line in enumerate(logged))


@pytest.mark.parametrize("target", ["pipe", "/dev/full"])
def test_process_ends_though_stderr_takes_nothing(target: str) -> None:
    with unread_pipe() as (_, writer), open("/dev/full", "wb") as full:
        stderr = writer if target == "pipe" else full.fileno()
        assert run("text", "exception", 5000, stderr).wait(30) == 1
