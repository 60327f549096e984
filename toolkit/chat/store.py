"""Saved conversations: one JSON file each, readable only by its owner."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from toolkit.chat.history import Conversation
from toolkit.chat.state import data_folder
from toolkit.errors import ConfigError

VERSION = 1
UNNAMED = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True)
class SavedConversation:
    path: Path
    model: str | None
    conversation: Conversation
    seconds_ago: float

    @property
    def name(self) -> str | None:
        """The name that the user gave it."""
        is_own = self.path.parent == data_folder() and not UNNAMED.fullmatch(self.path.stem)
        return self.path.stem if is_own else None

    @property
    def age(self) -> str:
        """Time since the last change, such as '5 min ago'."""
        for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
            if self.seconds_ago >= size:
                return f"{self.seconds_ago // size:.0f} {unit} ago"
        return "just now"


def new_path() -> Path:
    """Return the path for a new conversation."""
    return data_folder() / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.urandom(2).hex()}.json"


def path_of(name: str) -> Path:
    """Return the path of the conversation of this name."""
    return data_folder() / f"{name}.json"


def write(path: Path, conversation: Conversation, model: str | None) -> None:
    """Replace the file's content atomically. Raises OSError."""
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


def read(path: Path) -> SavedConversation:
    """Read a conversation from its file. Raises ConfigError."""
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
        age = time.time() - path.stat().st_mtime
        return SavedConversation(path, content["model"], conversation, age)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a conversation saved by tk chat.") from None


def newest(count: int) -> list[SavedConversation]:
    """Return the last changed conversations, newest first. Unreadable files are skipped."""
    paths = sorted(
        data_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    found: list[SavedConversation] = []
    for path in paths:
        if len(found) == count:
            break
        try:
            found.append(read(path))
        except ConfigError:
            continue
    return found
