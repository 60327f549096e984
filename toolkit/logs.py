"""Log of every process of a server: format, a stderr that never blocks, file of tracebacks."""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import select
import shutil
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

DEBUG = "TK_DEBUG"  # environment variable: 1 shows tracebacks on the terminal
MAX_LOG_BYTES = 2**20  # then the file becomes errors.log.1 and a new one starts


def error_log() -> Path:
    """Return the file of tracebacks: `errors.log` in $XDG_STATE_HOME/tk or ~/.local/state/tk."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tk" / "errors.log"


def shows_tracebacks() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")


def save_traceback(error: BaseException) -> str:
    """Append the error's traceback to the file; return a sentence that says where it is."""
    from toolkit.version import __version__

    path = error_log()
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    head = f"{when} tk {__version__} {' '.join(sys.argv[1:2])} (process {os.getpid()})\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(head + "".join(traceback.format_exception(error)) + "\n")
    except OSError:
        return f"{DEBUG}=1 shows its traceback."
    return f"Its traceback is in {path}; {DEBUG}=1 shows it."


PROGRESS = logging.getLogger("toolkit.progress")
"""Logger of progress: several texts a second, each replaces the one before; the last is empty.
Disabled where a line cannot be replaced."""
PROGRESS.propagate, PROGRESS.disabled = False, True
PROGRESS.setLevel(logging.INFO)


class _InPlace(logging.Handler):
    """Writes each message over the one before, on a line of the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r{escape_line(record.getMessage())[: columns - 1]}\x1b[K")
        sys.stderr.flush()


class LogStyle(msgspec.Struct, frozen=True):
    """Log level and format: `json` writes one object per line."""

    level: str = "warning"
    json: bool = False

    @classmethod
    def of(cls, level: str, format: str) -> LogStyle:
        """Choose the format: text, json, or auto, which is text on a terminal."""
        return cls(level, format == "json" or (format == "auto" and not sys.stderr.isatty()))

    def apply(self) -> None:
        """Log to stderr in this style from now on, Python's warnings too.

        Nothing written to sys.stderr blocks then."""
        formatter = _JSON() if self.json else _Text("%(asctime)s %(levelname)s %(message)s")
        _queue_stderr(formatter)
        handler = logging.StreamHandler()
        handler.setFormatter(formatter)
        if sys.stderr.isatty() and not self.json and self.level in ("debug", "info"):
            PROGRESS.handlers, PROGRESS.disabled = [_InPlace()], False
        logging.basicConfig(level=self.level.upper(), handlers=[handler])
        logging.captureWarnings(True)
        if self.level == "info":  # the hub's library logs each of its requests at this level
            logging.getLogger("httpx2").setLevel(logging.WARNING)


def writes_json() -> bool:
    """Return True if this process logs JSON: then stderr has nothing else."""
    return any(isinstance(one.formatter, _JSON) for one in logging.getLogger().handlers)


MAX_QUEUED_BYTES = 2**20  # of output that stderr has not taken; further lines are dropped
RETRY_INTERVAL = 1.0  # seconds after a failed write
FLUSH_TIMEOUT = 1.0  # seconds for the last lines of a process
_MAX_WRITE = select.PIPE_BUF  # bytes: writes of several processes to a pipe do not mix up to here


class LogQueue(io.RawIOBase):
    """Writes to a descriptor in a thread, so that a reader who stops does not stop the server.

    If the queue is full or a write fails, drops lines until all queued ones are written. Then a
    line in the log says how many."""

    def __init__(self, descriptor: int, notice: Callable[[int], str]) -> None:
        """`notice`: makes the line that reports a number of dropped lines."""
        self.notice = notice
        self.num_dropped = 0  # lines, in total
        self._unreported = 0  # dropped lines that no line has reported
        self._descriptor = descriptor
        self._chunks: deque[bytes] = deque()
        self._size = 0  # bytes in _chunks and of the write in progress
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="log").start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Queue or drop the bytes."""
        chunk = bytes(data)
        with self._changed:
            if self._unreported or self._size + len(chunk) > MAX_QUEUED_BYTES:
                self._drop(chunk.count(b"\n"))
            else:
                self._chunks.append(chunk)
                self._size += len(chunk)
            self._changed.notify_all()
        return len(chunk)

    def drain(self, timeout: float) -> None:
        """Wait until all queued bytes are written, or `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, timeout)

    def _drop(self, num_lines: int) -> None:
        self._unreported += num_lines
        self.num_dropped += num_lines

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._unreported)
                reported = 0
                if self._chunks:
                    data = self._take()
                else:
                    reported, self._unreported = self._unreported, 0
                    data = self.notice(reported).encode()
                    self._size += len(data)
            rest = self._write_all(data)
            with self._changed:
                self._size -= len(data)
                if rest:
                    self._unreported += reported
                    lost = b"".join(self._chunks) + (b"" if reported else rest)
                    self._drop(lost.count(b"\n"))
                    self._chunks.clear()
                    self._size = 0
                self._changed.notify_all()
            if rest:
                time.sleep(RETRY_INTERVAL)

    def _take(self) -> bytes:
        data = self._chunks.popleft()
        while self._chunks and len(data) + len(self._chunks[0]) <= _MAX_WRITE:
            data += self._chunks.popleft()
        return data

    def _write_all(self, data: bytes) -> bytes:
        """Return what could not be written."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                ready = select.poll()
                ready.register(self._descriptor, select.POLLOUT)
                ready.poll()
            except OSError:
                break
        return data


def _queue_stderr(formatter: logging.Formatter) -> None:
    """Let sys.stderr write to a queue, unless it is no file of the system."""

    def notice(count: int) -> str:
        lines = f"{count} log line{'s were' if count > 1 else ' was'} dropped: stderr took no more"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, lines, None, None)
        return formatter.format(record) + "\n"

    if (queue := _log_queue()) is not None:
        queue.notice = notice
        return
    try:
        queue = LogQueue(sys.stderr.fileno(), notice)
    except (AttributeError, OSError):
        return
    sys.stderr = io.TextIOWrapper(
        queue, sys.stderr.encoding, "backslashreplace", line_buffering=True
    )
    atexit.register(flush_stderr)


def _log_queue() -> LogQueue | None:
    queue = getattr(sys.stderr, "buffer", None)
    return queue if isinstance(queue, LogQueue) else None


def flush_stderr() -> None:
    """Wait a limited time until stderr has taken all lines. Needed before `os._exit`."""
    if (queue := _log_queue()) is not None:
        sys.stderr.flush()
        queue.drain(FLUSH_TIMEOUT)


def num_dropped_lines() -> int:
    """Return the number of log lines that this process has dropped."""
    return 0 if (queue := _log_queue()) is None else queue.num_dropped


_CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, characters that reorder a line, lone surrogates."""
_IN_TEXT = {"\n": "\n", "\t": "\t", "\r": ""}  # what `escape_controls` makes of them


def escape_line(text: str) -> str:
    """Escape control characters, so that text from outside cannot control a terminal or log."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def escape_controls(text: str) -> str:
    """Escape like `escape_line`, but keep line breaks and tabs, and drop carriage returns."""
    return _CONTROL.sub(lambda found: _IN_TEXT.get(found[0], escape_line(found[0])), text)


def escape_json(text: str) -> str:
    """Escape the control characters that JSON may contain. The values stay the same."""
    return _CONTROL.sub(lambda found: _IN_TEXT.get(found[0], f"\\u{ord(found[0]):04x}"), text)


class _Text(logging.Formatter):
    default_time_format = "%H:%M:%S"
    default_msec_format = ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """Escape line breaks, so that a client cannot forge a log line."""
        return escape_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Name the error and the file of its traceback instead of printing the traceback."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or shows_tracebacks():
            return escape_controls(super().format(record))
        plain = logging.makeLogRecord(record.__dict__ | {"exc_info": None, "exc_text": None})
        cause = escape_line(f"{type(error).__name__}: {error}")
        return f"{super().format(plain)} ({cause}. {save_traceback(error)})"


class _JSON(logging.Formatter):
    """One JSON object per record, with the record's `fields` and complete traceback."""

    def format(self, record: logging.LogRecord) -> str:
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{created}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escape_json(msgspec.json.encode(line).decode())
