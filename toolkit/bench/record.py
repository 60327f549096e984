"""What is written down about requests. Times are seconds after the start of the measurement."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Seconds = array[float]
else:
    Seconds = (
        array  # Python 3.11's takes no parameter where annotations are evaluated: for messages, they are
    )


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
    gaps: Seconds = field(default_factory=lambda: array("d"))
    """Seconds, one per token after the first."""
    gaps_per_token: bool = True
    """False when a piece's tokens could not be counted, and `gaps` has one per piece."""
    error: tuple[str, str] | None = None
    """(cause, example)"""

    @property
    def ok(self) -> bool:
        return self.ended is not None and self.error is None


@dataclass(slots=True)
class Share:
    """What one client process did: its requests, and how it fared itself."""

    records: list[RequestRecord]
    loop_delays: Seconds = field(default_factory=lambda: array("d"))
    """Seconds by which its event loop was late, looked at every now and then."""
    cpu_share: float = 0.0
    """Of one core."""
