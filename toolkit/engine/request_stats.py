"""What one request to the server made the engine do, for its line in the log and its trace."""

from __future__ import annotations

from contextvars import ContextVar

from toolkit.engine.output_processor import SequenceState
from toolkit.engine.stream import RequestStream
from toolkit.metrics import Metrics


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
        return sum(
            sequence.num_tokens for stream in self.streams for sequence in stream.state.sequences
        )

    @property
    def is_complete(self) -> bool:
        """Whether all that was asked of the engine has come."""
        return all(stream.state.finished for stream in self.streams)

    @property
    def time_to_first_token(self) -> float | None:
        first = [
            s.first_token
            for stream in self.streams
            for s in stream.state.sequences
            if s.first_token
        ]
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


def observe_begin(metrics: Metrics, stream: RequestStream, now: float) -> None:
    """A request's first token has come."""
    metrics.time_to_first_token.observe(now - stream.arrival)
    metrics.observe_prompt(len(stream.state.prompt_token_ids), stream.state.num_cached_tokens)


def observe_end(
    metrics: Metrics, sequence: SequenceState, stream: RequestStream | None, reason: str, now: float
) -> None:
    """A sequence has ended, and its request if it was the last one."""
    metrics.count_finished(reason)
    metrics.request_generation_tokens.observe(sequence.num_tokens)
    metrics.request_num_preemptions.observe(sequence.num_preemptions)
    if sequence.num_tokens > 1:
        seconds = sequence.last_token - sequence.first_token
        metrics.time_per_output_token.observe(seconds / (sequence.num_tokens - 1))
    if stream is None or not stream.state.finished:
        return
    metrics.e2e_request_latency.observe(now - stream.arrival)
    metrics.request_prompt_tokens.observe(len(stream.state.prompt_token_ids))
    metrics.request_params_n.observe(len(stream.state.sequences))
    longest = max(sequence.num_tokens for sequence in stream.state.sequences)
    metrics.request_max_num_generation_tokens.observe(longest)
    metrics.request_params_max_tokens.observe(stream.request.spec.max_tokens)
    if stream.scheduled and sequence.first_token:
        metrics.inference_time.observe(now - stream.scheduled)
        metrics.prefill_time.observe(sequence.first_token - stream.scheduled)
        metrics.decode_time.observe(now - sequence.first_token)
