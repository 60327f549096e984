"""Datasets read from files. Requests follow the order of the file and start over at its end."""

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
    PrefixDataset,
    Prompt,
    PromptGenerator,
    Tokens,
    generated_dataset,
)
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError

CHARACTERS_PER_TOKEN = 4  # estimate for English text, which needs no tokenizer

MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048
"""Lengths of ShareGPT conversations that are kept, in tokens, as in vLLM."""

BLOCK_SIZE = 512  # tokens per id in a trace's `hash_ids`

BLOCK_CACHE_SIZE = 4096  # blocks to keep. Generating one takes microseconds

INPUT_KEYS = ("input_length", "ContextTokens", "Request tokens")
OUTPUT_KEYS = ("output_length", "GeneratedTokens", "Response tokens")
"""Keys of the traces of Mooncake, Azure and BurstGPT."""


class RecordedPrompts:
    """Prompts of a file."""

    times: Times | None = None

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace: time in seconds, lengths in tokens, ids of the prompt's blocks."""

    at: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...]


class TraceDataset:
    """Generated prompts with a trace's lengths. Blocks with equal ids have equal tokens."""

    def __init__(self, config: BenchConfig, lines: Sequence[TraceLine]) -> None:
        self._generator = PromptGenerator(config)
        self._lines = sorted(lines, key=lambda line: line.at)
        self.times: Times | None = np.array([line.at - self._lines[0].at for line in self._lines])
        self._block = lru_cache(BLOCK_CACHE_SIZE)(self._generate_block)

    def prompt(self, index: int) -> Prompt:
        line = self._lines[index % len(self._lines)]
        shared = [self._block(number) for number in line.blocks]
        rest = self._generator.tokens(
            self._generator.rng(index), max(0, line.input_len - BLOCK_SIZE * len(shared))
        )
        return self._generator.prompt(
            np.concatenate((*shared, rest))[: line.input_len], line.output_len
        )

    def _generate_block(self, number: int) -> Tokens:
        return self._generator.tokens(self._generator.rng(number, BLOCK), BLOCK_SIZE)


def open_dataset(config: BenchConfig) -> Dataset:
    """Open the dataset of a config. Raises ConfigError if its file cannot be read."""
    if config.dataset_name == "random":
        return generated_dataset(config)
    if config.dataset_name == "prefix":
        return PrefixDataset(config)
    return _open_recorded(config)


def _open_recorded(config: BenchConfig) -> Dataset:
    """Read the dataset at `dataset_path`. Raises ConfigError with the line that is invalid."""
    assert config.dataset_path is not None, "checked by the config"
    path = Path(config.dataset_path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--dataset-path: cannot read {path}: {why}.", param="dataset_path"
        ) from None
    if config.dataset_name == "trace":
        found: Sequence[Any] = [_parse_trace(row, f"{path}:{n}") for n, row in _rows(path, text)]
    elif config.dataset_name == "custom":
        found = [_parse_custom(row, f"{path}:{n}", config) for n, row in _json_lines(path, text)]
    else:
        found = list(_parse_sharegpt(path, text))
        if not found:
            raise ConfigError(
                f"{path} has no conversation of the lengths that are sent: questions of {MIN_LEN} "
                f"to {MAX_PROMPT_LEN} tokens, answers of {MIN_LEN} or more, and both together at "
                f"most {MAX_TOTAL_LEN}.",
                param="dataset_path",
            )
    if not found:
        raise ConfigError(f"{path} contains no requests.", param="dataset_path")
    return TraceDataset(config, found) if config.dataset_name == "trace" else RecordedPrompts(found)


def _json_lines(path: Path, text: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of each non-empty line."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise _invalid(f"{path}:{number}", f"is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise _invalid(f"{path}:{number}", "is not a JSON object")
            yield number, row


def _rows(path: Path, text: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of JSON lines, or of CSV with a header."""
    if text.lstrip().startswith("{"):
        return _json_lines(path, text)
    return enumerate(csv.DictReader(io.StringIO(text)), 2)


def _parse_custom(row: dict[str, Any], where: str, config: BenchConfig) -> Prompt:
    content = row.get("messages", row.get("prompt"))
    is_chat = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    is_ids = isinstance(content, list) and all(isinstance(part, int) for part in content)
    if not content or not (isinstance(content, str) or is_chat or is_ids):
        raise _invalid(where, "has neither a prompt nor messages")
    if is_chat != config.is_chat and not isinstance(content, str):
        needed = "chat" if is_chat else "completions"
        raise _invalid(where, f"needs --endpoint {needed}")
    length = row.get(
        "output_len", row.get("output_tokens", row.get("max_tokens", config.random_output_len))
    )
    if not isinstance(length, int) or length < 1:
        raise _invalid(where, f"has an invalid output_len: {length!r}")
    return Prompt(content, length)


def _parse_trace(row: dict[str, Any], where: str) -> TraceLine:
    try:
        if "timestamp" in row:
            at = float(row["timestamp"]) / 1e3
        else:
            at = _parse_time(row["TIMESTAMP" if "TIMESTAMP" in row else "Timestamp"])
        input_len, output_len = (
            int(next(row[key] for key in keys if key in row)) for keys in (INPUT_KEYS, OUTPUT_KEYS)
        )
        blocks = tuple(int(number) for number in row.get("hash_ids") or ())
    except (KeyError, StopIteration, TypeError, ValueError, RuntimeError) as error:
        raise _invalid(where, f"is not a trace line ({type(error).__name__}: {error})") from None
    return TraceLine(at, max(1, input_len), max(1, output_len), blocks)


def _parse_time(text: str) -> float:
    """Return seconds from a number or from a date."""
    try:
        return float(text)
    except ValueError:
        return float(np.datetime64(text, "us").astype(np.int64)) / 1e6


def _parse_sharegpt(path: Path, text: str) -> Iterable[Prompt]:
    """Yield the first question of every conversation that has an answer to it."""
    try:
        conversations = orjson.loads(text)
        pairs = [c["conversations"][:2] for c in conversations if len(c["conversations"]) >= 2]
        turns = [(str(first["value"]), str(second["value"])) for first, second in pairs]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise _invalid(str(path), f"is not a list of ShareGPT conversations ({error})") from None
    for question, answer in turns:
        input_len, output_len = (len(part) // CHARACTERS_PER_TOKEN for part in (question, answer))
        is_too_long = input_len > MAX_PROMPT_LEN or input_len + output_len > MAX_TOTAL_LEN
        if min(input_len, output_len) >= MIN_LEN and not is_too_long:
            yield Prompt(question, output_len)


def _invalid(where: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{where} {problem}. 'tk bench --help-all' describes the formats.",
        param="dataset_path",
    )
