"""Read the small files of a model: from its folder, or from the GGUF file that stands for one.

Some files of a folder in CTranslate2's format are derived from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from toolkit.ctranslate2 import whisper
from toolkit.ctranslate2.file import is_ctranslate2
from toolkit.files import read_text
from toolkit.gguf.config import read_config
from toolkit.gguf.file import GGUF, read_gguf
from toolkit.gguf.tokenizer import generation_config, tokenizer_config

_MADE: dict[str, Callable[[GGUF], str]] = {
    "config.json": lambda model: json.dumps(read_config(model)),
    "generation_config.json": lambda model: json.dumps(generation_config(model)),
    "tokenizer_config.json": lambda model: json.dumps(tokenizer_config(model)),
    "README.md": lambda model: _card(model),
}
"""Files whose content is derived from metadata."""


MADE_FILES = tuple(_MADE)


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_file(folder: Path, name: str) -> str | None:
    """Return the text of a model's file; None if there is none of that name.

    Raises OSError or UnicodeDecodeError if it cannot be read, CheckpointError for a bad GGUF file
    or `model.bin`."""
    if is_gguf(folder):
        return made_file(read_gguf(folder), name) if name in MADE_FILES else None
    if name in whisper.MADE_FILES and is_ctranslate2(folder):
        return whisper.made_file(folder, name)
    path = folder / name
    return read_text(path) if path.is_file() else None


def made_file(model: GGUF, name: str) -> str:
    """Return the content of one of MADE_FILES. Raises CheckpointError for wrong metadata."""
    return _MADE[name](model)


def _card(model: GGUF) -> str:
    """Return the header of a model card, with the license."""
    name = model.get("general.license", str)
    return f"---\nlicense: {name}\n---\n" if name else ""
