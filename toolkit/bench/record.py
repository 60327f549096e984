"""What is written down about one request. Times are seconds after the start of the measurement."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request's times and counts; those that never came are None.

    `scheduled` is when it was to arrive, `woken` when the client came to it, `sent` when it was sent: that is
    later than `woken` when it waited for one of `--max-concurrency` places.
    """

    scheduled: float
    woken: float | None = None
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    max_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))  # seconds, one per token after the first
    gaps_per_token: bool = (
        True  # False when a piece's tokens could not be counted, and `gaps` has one per piece
    )
    error: tuple[str, str] | None = None  # cause, example

    @property
    def ok(self) -> bool:
        return self.ended is not None and self.error is None
