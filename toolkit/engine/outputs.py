"""Outputs of the Python API. Their fields follow vLLM's."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, overload

from toolkit.text.tokenizer import Tokenizer

Record = tuple[Any, ...]
"""Rank of the chosen token, then tokens and log-probabilities in turn (`kernels.logprobs`)."""


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token at one position. `rank`: 1 for the likeliest, None if unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # by token id. The token in the output comes first
Position = TypeVar("Position", bound=PositionLogprobs | None)


class LogprobList(Sequence[Position]):
    """Log-probabilities of consecutive positions: a list whose items are made when they are read.

    It holds the core's records as bytes, because most positions of most answers are only sent on,
    and a dict for each takes longer than the rest of the host's work for a token."""

    __slots__ = ("_data", "_size", "_tokenizer", "starts_prompt")
    __hash__ = None  # type: ignore[assignment]  # lists have none

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        size: int = 0,
        data: bytes | bytearray = b"",
        *,
        starts_prompt: bool = False,
    ) -> None:
        """`data`: records of `size` bytes. `starts_prompt`: the first position is a prompt's first
        token, which has no log-probability: None."""
        self._tokenizer, self._size, self._data = tokenizer, size, bytearray(data)
        self.starts_prompt = starts_prompt

    def append_record(self, record: bytes) -> None:
        """Append a position. There is one already."""
        self._data += record

    def extend(self, later: LogprobList[Position]) -> None:
        """Append later positions."""
        self._size = self._size or later._size
        self._data += later._data
        self.starts_prompt = self.starts_prompt or later.starts_prompt

    def copy(self) -> LogprobList[Position]:
        return LogprobList(
            self._tokenizer, self._size, self._data, starts_prompt=self.starts_prompt
        )

    def records(self) -> Iterator[Record]:
        """Return the records of all positions but a prompt's first."""
        return _record_format(self._size).iter_unpack(self._data) if self._data else iter(())

    def chosen(self) -> Iterator[float]:
        """Return the log-probability of each token in the output."""
        return (one for (one,) in _chosen_format(self._size).iter_unpack(self._data))

    def __len__(self) -> int:
        return self.starts_prompt + (len(self._data) // self._size if self._data else 0)

    def __iter__(self) -> Iterator[Position]:
        if self.starts_prompt:
            yield cast(Position, None)
        for record in self.records():
            yield self._position(record)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> list[Position]: ...
    def __getitem__(self, index: int | slice) -> Position | list[Position]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] - self.starts_prompt
        if at < 0:
            return cast(Position, None)
        return self._position(_record_format(self._size).unpack_from(self._data, at * self._size))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogprobList | list):
            return NotImplemented
        return list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Position]], tuple[list[Position]]]:
        """Pickle and copy as a list, which needs no tokenizer."""
        return list, (list(self),)

    def _position(self, record: Record) -> Position:
        tokenizer, ranks = self._tokenizer, (record[0], *range(1, len(record) // 2))
        position: PositionLogprobs = {}
        for rank, token, logprob in zip(ranks, record[1::2], record[2::2], strict=True):
            if token not in position:
                text = "" if tokenizer is None else tokenizer.token_names[token]
                position[token] = Logprob(logprob, rank, text)
        return cast(Position, position)


def unique_pairs(record: Record) -> list[tuple[int, float]]:
    """Return (token, log-probability) of the chosen token, then of the likeliest others."""
    pairs = [*zip(record[1::2], record[2::2], strict=True)]
    chosen = record[1]
    return [pairs[0], *(pair for pair in pairs[1:] if pair[0] != chosen)]


def pack_record(rank: int, pairs: Sequence[tuple[int, float]]) -> bytes:
    """Return a record. `pairs`: the chosen token, then the likeliest ones."""
    size = 4 * (1 + 2 * len(pairs))
    return _record_format(size).pack(rank, *(number for pair in pairs for number in pair))


@functools.cache
def _record_format(size: int) -> struct.Struct:
    """Return the format of records of `size` bytes."""
    return struct.Struct("=i" + "if" * ((size - 4) // 8))


@functools.cache
def _chosen_format(size: int) -> struct.Struct:
    """Return the format that reads only the chosen token's log-probability."""
    return struct.Struct(f"=8xf{size - 12}x")


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: LogprobList[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """Stop string or stop token that ended the answer. None for the model's end token."""
    num_preemptions: int = field(default=0, compare=False)
    """Times that its memory was given to others, and it waited to be computed again."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: LogprobList[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    finished_at: float = field(default=0.0, compare=False)
    """Time of the last token on the monotonic clock. 0 until then."""


@dataclass(slots=True)
class Delta:
    """New output of one answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: LogprobList[PositionLogprobs] | None = None
    prompt_logprobs: LogprobList[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    embedding: bytes = b""  # float32 vector of a pooled prompt
