"""What the log looks like, in every process of a server."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec


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
        handler.setFormatter(_JSON() if self.json else _Text("%(asctime)s %(levelname)s %(message)s"))
        logging.basicConfig(level=self.level.upper(), handlers=[handler])


_CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
"""What begins a line or speaks to a terminal, as it is written in a program."""


class _Text(logging.Formatter):
    default_time_format = "%H:%M:%S"
    default_msec_format = ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """On one line: what a client sends forges no other."""
        return super().formatMessage(record).translate(_CONTROLS)


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
