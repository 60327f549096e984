"""What the log looks like, in every process of a server, and where tracebacks are kept: a terminal shows none."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

DEBUG = "TK_DEBUG"
"""The variable that has tracebacks shown."""
MOST_KEPT = 2**20
"""Bytes of tracebacks in one file; the one before it is kept beside it."""


def error_log() -> Path:
    """The file of tracebacks: `errors.log` in $XDG_STATE_HOME/tk, else in ~/.local/state/tk."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tk" / "errors.log"


def shows_tracebacks() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")


def keep_traceback(error: BaseException) -> str:
    """Writes an error's traceback into the file; a sentence that says where it is to be found."""
    from toolkit.version import __version__

    path = error_log()
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    head = f"{when} tk {__version__} {' '.join(sys.argv[1:2])} (process {os.getpid()})\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and path.stat().st_size > MOST_KEPT:
            path.replace(path.with_suffix(".log.1"))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(head + "".join(traceback.format_exception(error)) + "\n")
    except OSError:
        return f"{DEBUG}=1 shows its traceback."
    return f"Its traceback is in {path}; {DEBUG}=1 shows it."


class LogStyle(msgspec.Struct, frozen=True):
    """`level`: the least that is told; `json`: an object on each line, else text."""

    level: str = "warning"
    json: bool = False

    @classmethod
    def of(cls, level: str, format: str) -> LogStyle:
        """`format`: text, json, or auto, which is text on a terminal."""
        return cls(level, format == "json" or (format == "auto" and not sys.stderr.isatty()))

    def apply(self) -> None:
        """Makes it this process' log, on stderr."""
        handler = logging.StreamHandler()
        handler.setFormatter(
            _JSON() if self.json else _Text("%(asctime)s %(levelname)s %(message)s")
        )
        logging.basicConfig(level=self.level.upper(), handlers=[handler])


_CONTROLS = {
    code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
"""What begins a line or speaks to a terminal, as it is written in a program."""


def harmless(text: str) -> str:
    """Text from outside as a terminal may see it: it has its lines, and nothing that steers the terminal."""
    return "\n".join(line.translate(_CONTROLS) for line in text.split("\n"))


class _Text(logging.Formatter):
    default_time_format = "%H:%M:%S"
    default_msec_format = ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """On one line: what a client sends forges no other."""
        return super().formatMessage(record).translate(_CONTROLS)

    def format(self, record: logging.LogRecord) -> str:
        """With the error's name and the place of its traceback, instead of the traceback itself."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or shows_tracebacks():
            return super().format(record)
        plain = logging.makeLogRecord(record.__dict__ | {"exc_info": None, "exc_text": None})
        return f"{super().format(plain)} ({type(error).__name__}: {error}. {keep_traceback(error)})"


class _JSON(logging.Formatter):
    """What a record carries as `fields` stands beside its message."""

    def format(self, record: logging.LogRecord) -> str:
        milliseconds = f"{record.msecs:03.0f}"
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
