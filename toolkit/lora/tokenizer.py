"""Tokenizers that adapters and drafters come with, which must have the base model's tokens."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from toolkit.errors import CheckpointError, ConfigError
from toolkit.gguf.file import read_gguf
from toolkit.gguf.folder import is_gguf
from toolkit.sequence import Adapter

logger = logging.getLogger(__name__)

MAX_DIFFERENCE = 0.01  # of tokens: converters rename control tokens and fill gaps
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_SETTINGS = ("version", "truncation", "padding")  # of tokenizer.json, which do not change tokens


def require_same_tokenizer(adapter: Adapter, base: Path) -> None:
    """Compare tokenizers. `base`: folder of the base model's.

    Raises CheckpointError if the adapter was trained with another one."""
    folder = Path(adapter.folder)
    own, compared = _tokenizer_files(folder, base)
    for name in compared:
        if not _is_same(folder / name, base / name, _meaning):
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


def require_same_vocabulary(drafter: Path, base: Path) -> None:
    """Compare the tokens of two models' tokenizers, given their folders.

    Raises ConfigError if a token has another id in the drafter's."""
    own, compared = _tokenizer_files(drafter, base)
    for name in compared:
        if not _is_same(drafter / name, base / name, _vocabulary):
            raise ConfigError(
                f"--speculative-config: the drafter {drafter} has other tokens than {base}: their "
                f"{name} differ. Use a drafter of the same family.",
                param="speculative_config",
            )
    if not compared and (tokens := _tokens_of_both(drafter, base)) is not None:
        theirs, ours = tokens
        known = theirs.keys() & ours.keys()
        differing = sum(theirs[id] != ours[id] for id in known)
        if differing > MAX_DIFFERENCE * len(known):
            raise ConfigError(
                f"--speculative-config: the drafter {drafter} has other tokens than {base}: "
                f"{differing:,} of its {len(known):,} differ. Use a drafter of the same family.",
                param="speculative_config",
            )
    elif not compared:
        logger.warning(
            "the tokens of the drafter (%s: %s) cannot be compared with those of %s",
            drafter,
            ", ".join(own) or "no tokenizer",
            base,
        )


def _tokens_of_both(drafter: Path, base: Path) -> tuple[dict[int, str], dict[int, str]] | None:
    """Return the tokens of both by their ids, if one is a GGUF file; None if they are not known."""
    if not (is_gguf(drafter) or is_gguf(base)):
        return None
    own, others = _tokens(drafter), _tokens(base)
    return (own, others) if own and others else None


def _tokens(folder: Path) -> dict[int, str]:
    if is_gguf(folder):
        return dict(enumerate(read_gguf(folder).get("tokenizer.ggml.tokens", list, [])))
    file = folder / "tokenizer.json"
    ids = _vocabulary(file.read_bytes()) if file.is_file() else {}
    if isinstance(ids, tuple):  # a Unigram model: pieces and scores in order
        pieces, added = ids
        ids = {piece: id for id, (piece, _) in enumerate(pieces or ())} | added
    return {id: token for token, id in ids.items()}


def _tokenizer_files(folder: Path, base: Path) -> tuple[list[str], list[str]]:
    """Return (names of the folder's files, those that `base` has, too)."""
    own = [name for name in FILES if (folder / name).is_file()]
    return own, [name for name in own if (base / name).is_file()]


def _is_same(one: Path, other: Path, read: Callable[[bytes], Any]) -> bool:
    first, second = one.read_bytes(), other.read_bytes()
    if first == second:
        return True
    if one.suffix != ".json":
        return False
    try:
        return bool(read(first) == read(second))
    except (msgspec.DecodeError, RecursionError):
        return False


def _meaning(data: bytes) -> Any:
    content = msgspec.json.decode(data)
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if key not in _SETTINGS}
    return content


def _vocabulary(data: bytes) -> Any:
    """Return the tokens of a tokenizer.json or vocab.json, with their ids or in their order."""
    content = msgspec.json.decode(data)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return content
    added = content.get("added_tokens") or []
    ids = {one.get("content"): one.get("id") for one in added if isinstance(one, dict)}
    tokens = content["model"].get("vocab")
    if isinstance(tokens, dict):
        return tokens | ids  # an added token may be in both
    return tokens, ids
