"""What one request to the server made the engine do, for its line in the log and its trace."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.engine.stream import RequestStream


class RequestRecord:
    """Filled by the engine while the server's code for the request runs; read when it is answered. Seconds are on the
    monotonic clock.
    """

    __slots__ = ("error", "origin", "started", "streams")

    def __init__(self, started: float, origin: str = "") -> None:
        """`origin`: the address that the request came from."""
        self.started = started
        self.origin = origin
        self.streams: list[RequestStream] = []
        self.error: Exception | None = None
        """What ended a streamed answer that had begun."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(stream.state.prompt_token_ids) for stream in self.streams)

    @property
    def num_cached_tokens(self) -> int:
        return sum(stream.state.num_cached_tokens for stream in self.streams)

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for stream in self.streams for sequence in stream.state.sequences)

    @property
    def is_complete(self) -> bool:
        """Whether all that was asked of the engine has come."""
        return all(stream.state.finished for stream in self.streams)

    @property
    def time_to_first_token(self) -> float | None:
        first = [s.first_token for stream in self.streams for s in stream.state.sequences if s.first_token]
        return min(first) - self.started if first else None

    @property
    def time_per_output_token(self) -> float | None:
        """The mean of its sequences."""
        each = [
            (s.last_token - s.first_token) / (s.num_tokens - 1)
            for stream in self.streams
            for s in stream.state.sequences
            if s.num_tokens > 1
        ]
        return sum(each) / len(each) if each else None


current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)
"""That of the request whose task runs."""
