"""The tokenizer that an adapter's folder may hold, which must be that of the base model."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from toolkit.errors import CheckpointError
from toolkit.sequence import Adapter

logger = logging.getLogger(__name__)

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_SETTINGS = ("version", "truncation", "padding")  # of tokenizer.json, which do not change tokens


def require_same_tokenizer(adapter: Adapter, base: Path) -> None:
    """Compare tokenizers. `base`: folder of the base model's.

    Raises CheckpointError if the adapter was trained with another one."""
    own = [name for name in FILES if (Path(adapter.folder) / name).is_file()]
    compared = [name for name in own if (base / name).is_file()]
    for name in compared:
        if not _is_same(Path(adapter.folder) / name, base / name):
            raise CheckpointError(
                f"adapter {adapter.name!r} ({adapter.folder}): its {name} is not that of the base "
                f"model, and requests have the base model's tokens. Remove the file if it does not "
                f"matter."
            )
    if own and not compared:
        logger.warning(
            "adapter %r: its tokenizer (%s) cannot be compared with the base model's, which is in "
            "another format",
            adapter.name,
            ", ".join(own),
        )


def _is_same(one: Path, other: Path) -> bool:
    first, second = one.read_bytes(), other.read_bytes()
    if first == second:
        return True
    if one.suffix != ".json":
        return False
    try:
        return bool(_meaning(first) == _meaning(second))
    except msgspec.DecodeError:
        return False


def _meaning(data: bytes) -> Any:
    content = msgspec.json.decode(data)
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if key not in _SETTINGS}
    return content
