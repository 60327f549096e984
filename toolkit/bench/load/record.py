"""Measured times and counts of requests. Times are seconds after the start of the measurement."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    Seconds = array[float]
    TokenCounts = array[int]
else:
    # Python 3.11's array takes no type parameter, and msgspec evaluates the annotations.
    Seconds = TokenCounts = array

Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecord:
    """Times and counts of one request. Times are None until they are known.

    `started` is when the client began with it. `sent` is later if the request had to wait because
    `--max-concurrency` requests were in flight."""

    number: int
    scheduled: float
    started: float | None = None
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    max_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # prompt tokens from the cache; None if not reported
    output_tokens: int = 0
    chunk_gaps: Seconds = field(default_factory=lambda: array("d"))
    """Seconds before each chunk of the answer after the first."""
    chunk_tokens: TokenCounts = field(default_factory=lambda: array("q"))
    """Tokens of each chunk after the first; 1 if the server does not report them."""
    has_token_counts: bool = True  # the server's total agrees with chunk_tokens
    error: tuple[str, str] | None = None  # (cause, example)

    @property
    def ok(self) -> bool:
        return self.ended is not None and self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from the scheduled arrival to the first token, which must exist."""
        assert self.first_token is not None
        return self.first_token - self.scheduled

    @property
    def service_ttft(self) -> float:
        """Seconds from sending to the first token."""
        assert self.sent is not None
        assert self.first_token is not None
        return self.first_token - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from the scheduled arrival to the end."""
        assert self.ended is not None
        return self.ended - self.scheduled

    @property
    def service_e2el(self) -> float:
        """Seconds from sending to the end."""
        assert self.sent is not None
        assert self.ended is not None
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    def token_gaps(self) -> Floats:
        """Return the seconds between tokens, one for each token after the first chunk.

        A chunk's gap is spread evenly over its tokens. Without token counts all chunks are assumed
        to carry the same number."""
        gaps = np.frombuffer(self.chunk_gaps, dtype=np.float64)
        if self.has_token_counts:
            sizes = np.frombuffer(self.chunk_tokens, dtype=np.int64)
            return np.repeat(gaps / sizes, sizes)
        return gaps * (len(gaps) + 1) / max(self.output_tokens, 1)

    def token_times(self) -> tuple[Floats, Floats]:
        """Return (arrival times, token counts) of all chunks. The counts sum to output_tokens."""
        if self.first_token is None:
            return np.empty(0), np.empty(0)
        gaps = np.frombuffer(self.chunk_gaps, dtype=np.float64)
        sizes = np.frombuffer(self.chunk_tokens, dtype=np.int64).astype(np.float64)
        if not self.has_token_counts:
            sizes = np.full(len(gaps), self.output_tokens / (len(gaps) + 1))
        first = max(self.output_tokens - sizes.sum(), 0.0)
        times = self.first_token + np.concatenate(([0.0], np.cumsum(gaps)))
        return times, np.concatenate(([first], sizes))


@dataclass(slots=True)
class ClientResult:
    """Requests of one client process, and how busy the client was."""

    records: list[RequestRecord]
    loop_delays: Seconds = field(default_factory=lambda: array("d"))
    """Delays of its event loop in seconds, sampled regularly."""
    cpu_share: float = 0.0  # of one core
