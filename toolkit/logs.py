"""Log format of every process of a server, and the file of tracebacks."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
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


class LogStyle(msgspec.Struct, frozen=True):
    """Log level and format: `json` writes one object per line."""

    level: str = "warning"
    json: bool = False

    @classmethod
    def of(cls, level: str, format: str) -> LogStyle:
        """Choose the format: text, json, or auto, which is text on a terminal."""
        return cls(level, format == "json" or (format == "auto" and not sys.stderr.isatty()))

    def apply(self) -> None:
        """Log to stderr in this style from now on."""
        handler = logging.StreamHandler()
        handler.setFormatter(
            _JSON() if self.json else _Text("%(asctime)s %(levelname)s %(message)s")
        )
        logging.basicConfig(level=self.level.upper(), handlers=[handler])


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
