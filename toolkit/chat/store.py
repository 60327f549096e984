"""Conversations on disk: one JSON file for each, which only its owner can read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from toolkit.chat.history import Conversation
from toolkit.chat.state import data_folder
from toolkit.errors import ConfigError

VERSION = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation on disk."""

    path: Path
    model: str | None
    conversation: Conversation
    seconds_ago: float

    @property
    def age(self) -> str:
        """`5 min ago`."""
        for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
            if self.seconds_ago >= size:
                return f"{self.seconds_ago // size:.0f} {unit} ago"
        return "just now"


def new_path() -> Path:
    """Where a conversation that begins now is kept."""
    return data_folder() / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.urandom(2).hex()}.json"


def write(path: Path, conversation: Conversation, model: str | None) -> None:
    """Puts a conversation in the place of what the file held. Raises OSError."""
    content = {
        "version": VERSION,
        "model": model,
        "system": conversation.system,
        "messages": conversation.messages,
    }
    new = path.with_name(path.name + ".new")
    new.touch(mode=0o600)
    new.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    new.replace(path)


def read(path: Path) -> Saved:
    """A conversation from its file. Raises ConfigError when it is none."""
    try:
        content = orjson.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ConfigError(
                f"{path} was written by another version of tk (format {content['version']!r})."
            )
        messages = content["messages"]
        if not all(
            isinstance(message, dict) and isinstance(message["role"], str) for message in messages
        ):
            raise TypeError
        conversation = Conversation(content["system"], messages)
        return Saved(path, content["model"], conversation, time.time() - path.stat().st_mtime)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ConfigError(f"{path} is no conversation that tk chat saved.") from None


def newest(count: int) -> list[Saved]:
    """The conversations that went on last, the newest first. Files that cannot be read are passed over."""
    paths = sorted(
        data_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    found: list[Saved] = []
    for path in paths:
        if len(found) == count:
            break
        try:
            found.append(read(path))
        except ConfigError:
            continue
    return found
