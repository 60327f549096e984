"""Datasets that are read from files: ShareGPT's conversations, one's own prompts, traces. Requests are taken in the
file's order, and from its beginning again when there are more.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from toolkit.bench.load.arrivals import Times
from toolkit.bench.load.dataset import (
    BLOCK,
    Dataset,
    Maker,
    PrefixDataset,
    Prompt,
    RandomDataset,
    Tokens,
)
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError

CHARACTERS_PER_TOKEN = 4
"""Of English text, roughly: recorded answers are as long as their text, without anybody's tokenizer."""

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Tokens: shorter conversations of ShareGPT, longer prompts and longer conversations are left out, as in vLLM."""

BLOCK_SIZE = 512
"""Tokens that one id of a trace's `hash_ids` stands for."""

RECENT_BLOCKS = 4096
"""Blocks that are kept; another one is made again, which takes microseconds."""

INPUT_KEYS = ("input_length", "ContextTokens", "Request tokens")
OUTPUT_KEYS = ("output_length", "GeneratedTokens", "Response tokens")
"""What traces call them: Mooncake's, Azure's, BurstGPT's."""


class Prompts:
    """Prompts as they stand in a file."""

    times: Times | None = None

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace: seconds after its beginning, tokens, and the ids of its prompt's blocks."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...]


class Trace:
    """Prompts of recorded lengths. What had equal blocks when it was recorded has equal blocks again."""

    def __init__(self, config: BenchConfig, lines: Sequence[TraceLine]) -> None:
        self._maker = Maker(config)
        self._lines = sorted(lines, key=lambda line: line.at)
        self.times: Times | None = np.array([line.at - self._lines[0].at for line in self._lines])
        self._block = lru_cache(RECENT_BLOCKS)(self._make_block)

    def prompt(self, index: int) -> Prompt:
        line = self._lines[index % len(self._lines)]
        shared = [self._block(number) for number in line.blocks]
        own = self._maker.tokens(
            self._maker.rng(index), max(0, line.input_len - BLOCK_SIZE * len(shared))
        )
        return self._maker.prompt(np.concatenate((*shared, own))[: line.input_len], line.output_len)

    def _make_block(self, number: int) -> Tokens:
        return self._maker.tokens(self._maker.rng(number, BLOCK), BLOCK_SIZE)


def open_dataset(config: BenchConfig) -> Dataset:
    """The dataset that a config names. Raises ConfigError when its file cannot be read."""
    if config.dataset_name == "random":
        return RandomDataset(config)
    if config.dataset_name == "prefix":
        return PrefixDataset(config)
    return _open_recorded(config)


def _open_recorded(config: BenchConfig) -> Dataset:
    """The dataset of `dataset_path`. Raises ConfigError, which names the line, when it is not of its kind."""
    assert config.dataset_path is not None, "the config has checked it"
    path = Path(config.dataset_path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--dataset-path cannot be read: {path}: {why}.", param="dataset_path"
        ) from None
    if config.dataset_name == "trace":
        found: Sequence[Any] = [_trace_line(row, f"{path}:{n}") for n, row in _rows(path, text)]
    elif config.dataset_name == "custom":
        found = [_custom(row, f"{path}:{n}", config) for n, row in _json_lines(path, text)]
    else:
        found = list(_sharegpt(path, text))
    if not found:
        raise ConfigError(f"{path} has no request in it.", param="dataset_path")
    return Trace(config, found) if config.dataset_name == "trace" else Prompts(found)


def _json_lines(path: Path, text: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """(number, object) of each line that is not empty."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise _wrong(f"{path}:{number}", f"is no JSON ({error})") from None
            if not isinstance(row, dict):
                raise _wrong(f"{path}:{number}", "is no JSON object")
            yield number, row


def _rows(path: Path, text: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """(number, row) of lines of JSON, or of CSV with a header."""
    if text.lstrip().startswith("{"):
        return _json_lines(path, text)
    return enumerate(csv.DictReader(io.StringIO(text)), 2)


def _custom(row: dict[str, Any], where: str, config: BenchConfig) -> Prompt:
    content = row.get("messages", row.get("prompt"))
    is_chat = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    is_ids = isinstance(content, list) and all(isinstance(part, int) for part in content)
    if not content or not (isinstance(content, str) or is_chat or is_ids):
        raise _wrong(where, "has neither a prompt nor messages")
    if is_chat != config.chat and not isinstance(content, str):
        needed = "chat" if is_chat else "completions"
        raise _wrong(where, f"is for --endpoint {needed}")
    length = row.get(
        "output_len", row.get("output_tokens", row.get("max_tokens", config.random_output_len))
    )
    if not isinstance(length, int) or length < 1:
        raise _wrong(where, f"has an output_len of {length!r}")
    return Prompt(content, length)


def _trace_line(row: dict[str, Any], where: str) -> TraceLine:
    try:
        if "timestamp" in row:
            at = float(row["timestamp"]) / 1e3
        else:
            at = _moment(row["TIMESTAMP" if "TIMESTAMP" in row else "Timestamp"])
        input_len, output_len = (
            int(next(row[key] for key in keys if key in row)) for keys in (INPUT_KEYS, OUTPUT_KEYS)
        )
        blocks = tuple(int(number) for number in row.get("hash_ids") or ())
    except (KeyError, StopIteration, TypeError, ValueError, RuntimeError) as error:
        raise _wrong(where, f"is no line of a trace ({type(error).__name__}: {error})") from None
    return TraceLine(at, max(1, input_len), max(1, output_len), blocks)


def _moment(text: str) -> float:
    """Seconds, of a number of them or of a date."""
    try:
        return float(text)
    except ValueError:
        return float(np.datetime64(text, "us").astype(np.int64)) / 1e6


def _sharegpt(path: Path, text: str) -> Iterable[Prompt]:
    """The first question of every conversation that has an answer to it."""
    try:
        conversations = orjson.loads(text)
        pairs = [c["conversations"][:2] for c in conversations if len(c["conversations"]) >= 2]
        turns = [(str(first["value"]), str(second["value"])) for first, second in pairs]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise _wrong(str(path), f"is no list of ShareGPT's conversations ({error})") from None
    for question, answer in turns:
        input_len, output_len = (len(part) // CHARACTERS_PER_TOKEN for part in (question, answer))
        too_long = input_len > LONGEST_PROMPT or input_len + output_len > LONGEST
        if min(input_len, output_len) >= SHORTEST and not too_long:
            yield Prompt(question, output_len)


def _wrong(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} {what}. 'tk bench --help-all' says what each dataset looks like.",
        param="dataset_path",
    )
