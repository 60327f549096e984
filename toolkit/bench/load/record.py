"""What is written down about requests. Times are seconds after the start of the measurement."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    Seconds = array[float]
    Counts = array[int]
else:
    # Python 3.11's takes no parameter where annotations are evaluated: for messages, they are
    Seconds = Counts = array

Floats = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecord:
    """One request's times and counts; those that never came are None.

    `scheduled` is when it was to arrive, `woken` when the client came to it, `sent` when it was sent: that is
    later than `woken` when it waited for one of `--max-concurrency` places.
    """

    number: int
    scheduled: float
    woken: float | None = None
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    max_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt, those that the server found in its cache, where it says."""
    output_tokens: int = 0
    gaps: Seconds = field(default_factory=lambda: array("d"))
    """Seconds between chunks of the answer: one for each chunk after the first."""
    sizes: Counts = field(default_factory=lambda: array("q"))
    """Tokens of each of those chunks; 1 where the server does not say."""
    sizes_known: bool = True
    """Whether the server's own count agrees with `sizes`."""
    error: tuple[str, str] | None = None
    """(cause, example)"""

    @property
    def ok(self) -> bool:
        return self.ended is not None and self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from the scheduled arrival to the first token. Only of an answer that has one; so the others."""
        assert self.first_token is not None
        return self.first_token - self.scheduled

    @property
    def service_ttft(self) -> float:
        """Seconds from the moment it was sent to the first token."""
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
        """Seconds from the moment it was sent to the end."""
        assert self.sent is not None
        assert self.ended is not None
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None when there is only one."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    def token_gaps(self) -> Floats:
        """Seconds between tokens, one for each token after the first chunk: a chunk's gap is spread evenly over the
        tokens that it carries. Where the server does not say how many those are, all chunks are taken to carry alike.
        """
        gaps = np.frombuffer(self.gaps, dtype=np.float64)
        if self.sizes_known:
            sizes = np.frombuffer(self.sizes, dtype=np.int64)
            return np.repeat(gaps / sizes, sizes)
        return gaps * (len(gaps) + 1) / max(self.output_tokens, 1)

    def token_times(self) -> tuple[Floats, Floats]:
        """(when chunks came, how many tokens each brought), the first one included; they add up to the answer."""
        if self.first_token is None:
            return np.empty(0), np.empty(0)
        gaps = np.frombuffer(self.gaps, dtype=np.float64)
        sizes = np.frombuffer(self.sizes, dtype=np.int64).astype(np.float64)
        if not self.sizes_known:
            sizes = np.full(len(gaps), self.output_tokens / (len(gaps) + 1))
        first = max(self.output_tokens - sizes.sum(), 0.0)
        return self.first_token + np.concatenate(([0.0], np.cumsum(gaps))), np.concatenate(
            ([first], sizes)
        )


@dataclass(slots=True)
class Share:
    """What one client process did: its requests, and how it fared itself."""

    records: list[RequestRecord]
    loop_delays: Seconds = field(default_factory=lambda: array("d"))
    """Seconds by which its event loop was late, looked at every now and then."""
    cpu_share: float = 0.0
    """Of one core."""
