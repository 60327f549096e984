"""Prompts. Generated ones depend on the seed alone and differ between requests."""

import io
import math
import wave
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from toolkit.bench.load.arrivals import Times
from toolkit.config.load import BenchConfig

Tokens = NDArray[np.int64]

WORDS = """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government number
    night point home water room mother area money story fact month lot right study book eye job word
    business issue side kind head house service friend father power hour game line end member law
    car city community name president team minute idea kid body information back parent face others
    level office door health person art war history party result change morning reason research girl
    guy moment air teacher force education foot boy age policy music market
""".split()  # noqa: SIM905  # a list of 106 literals reads worse

SAMPLE_RATE = 16_000
LOUDNESS = 2**11  # of noise, as samples of 16 bits
BOUNDARY = "tk-bench-1f6bd9c4c9a34d0f"

PREFIX, WARMUP, BLOCK = 1, 2, 3  # keys of the random streams that do not belong to a single request


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text, token ids, a conversation or a sound file, and the length of the answer."""

    content: str | list[int] | list[dict[str, Any]] | bytes
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request that is ready to send: its body and the length of the answer."""

    body: bytes
    max_tokens: int
    content_type: str = "application/json"


class Dataset(Protocol):
    """Prompts by index. `times`: recorded arrivals in seconds, or None."""

    @property
    def times(self) -> Times | None: ...

    def prompt(self, index: int) -> Prompt: ...


class PromptGenerator:
    """Generates prompts: token ids for completions, words for chats."""

    def __init__(self, config: BenchConfig) -> None:
        assert config.seed is not None, "a run has chosen its seed"
        self._seed = config.seed
        self._chat = config.is_chat
        self._vocab_size = len(WORDS) if config.is_chat else config.random_vocab_size

    def rng(self, *key: int) -> np.random.Generator:
        """Return a random generator that depends on the seed and the key alone."""
        return np.random.default_rng((self._seed, *key))

    def tokens(self, rng: np.random.Generator, length: int) -> Tokens:
        return rng.integers(0, self._vocab_size, length)

    def prompt(self, tokens: Tokens, max_tokens: int) -> Prompt:
        if self._chat:
            return Prompt(" ".join([WORDS[i] for i in tokens]), max_tokens)
        return Prompt(tokens.tolist(), max_tokens)


class RandomDataset:
    """Prompts that have nothing in common."""

    times: Times | None = None

    def __init__(self, config: BenchConfig, *key: int) -> None:
        """`key` separates these prompts from others of the same run."""
        self._generator = PromptGenerator(config)
        self._key = key
        self._input_range = length_range(config.random_input_len, config.random_range_ratio)
        self._seconds = config.clip_seconds
        self._output_range = length_range(config.random_output_len, config.random_range_ratio)

    def prompt(self, index: int) -> Prompt:
        rng = self._generator.rng(index, *self._key)
        input_len = int(rng.integers(*self._input_range, endpoint=True))
        output_len = int(rng.integers(*self._output_range, endpoint=True))
        return self._generator.prompt(self._tokens(rng, input_len), output_len)

    def _tokens(self, rng: np.random.Generator, input_len: int) -> Tokens:
        return self._generator.tokens(rng, input_len)


class PrefixDataset(RandomDataset):
    """Prompts that share one of a few prefixes and have nothing else in common."""

    def __init__(self, config: BenchConfig) -> None:
        super().__init__(config)
        self._prefixes = [
            self._generator.tokens(self._generator.rng(number, PREFIX), config.prefix_len)
            for number in range(config.num_prefixes)
        ]

    def _tokens(self, rng: np.random.Generator, input_len: int) -> Tokens:
        prefix = self._prefixes[rng.integers(len(self._prefixes))]
        return np.concatenate((prefix, self._generator.tokens(rng, input_len)))


class SoundDataset(RandomDataset):
    """WAV files of noise, each another."""

    def prompt(self, index: int) -> Prompt:
        rng = self._generator.rng(index, *self._key)
        output_len = int(rng.integers(*self._output_range, endpoint=True))
        return Prompt(self._file(rng), output_len)

    def _file(self, rng: np.random.Generator) -> bytes:
        num_samples = round(self._seconds * SAMPLE_RATE)
        samples = rng.integers(-LOUDNESS, LOUDNESS, num_samples, np.int16)
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, SAMPLE_RATE, num_samples, "NONE", ""))
            writer.writeframesraw(samples.astype("<i2").tobytes())
        return file.getvalue()


def generated_dataset(config: BenchConfig, *key: int) -> Dataset:
    """Return the dataset random: sound for a route that takes it."""
    return (SoundDataset if config.is_sound else RandomDataset)(config, *key)


def request(
    prompt: Prompt, config: BenchConfig, model: str, *, asks_counts: bool = False
) -> BenchRequest:
    """Return the request for a prompt. `asks_counts`: every event shall count the tokens so far."""
    max_tokens = prompt.max_tokens if config.output_len is None else config.output_len
    if isinstance(prompt.content, bytes):
        return _form(prompt.content, max_tokens, config, model)
    body: dict[str, Any] = {"model": model}
    if not config.is_chat:
        body["prompt"] = prompt.content
    elif isinstance(prompt.content, str):
        body["messages"] = [{"role": "user", "content": prompt.content}]
    else:
        body["messages"] = prompt.content
    body |= {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True}
        | ({"continuous_usage_stats": True} if asks_counts else {}),
    }
    if config.ignore_eos:
        body["ignore_eos"] = True
    body |= config.extra_body or {}
    return BenchRequest(orjson.dumps(body), max_tokens)


def _form(file: bytes, max_tokens: int, config: BenchConfig, model: str) -> BenchRequest:
    """Return the request for a file's transcript."""
    fields: dict[str, Any] = {
        "model": model,
        "language": "en",
        "stream": True,
        "stream_continuous_usage_stats": True,
        "max_completion_tokens": max_tokens,
        "ignore_eos": config.ignore_eos,
        **(config.extra_body or {}),
    }
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        f"{value if isinstance(value, str) else orjson.dumps(value).decode()}\r\n"
        for name, value in fields.items()
    ]
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="noise.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    )
    body = "".join([*parts, head]).encode() + file + f"\r\n--{BOUNDARY}--\r\n".encode()
    return BenchRequest(body, max_tokens, f"multipart/form-data; boundary={BOUNDARY}")


def length_range(length: int, ratio: float) -> tuple[int, int]:
    """Return the shortest and longest length within `ratio` of `length`; at least one token."""
    return max(1, math.floor(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio)))
