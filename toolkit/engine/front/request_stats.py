"""Engine statistics of one HTTP request, for its log line and trace.

The engine finds them in a context variable when it starts a request, and adds the stream. The
counts are those of the streams, read when the request is answered: tokens cost nothing extra."""

from contextvars import ContextVar

from toolkit.engine.front.output_processor import SequenceState
from toolkit.engine.front.stream import RequestStream
from toolkit.metrics import Metrics


class RequestStats:
    """Filled while the request is served, read once it is answered. Times are monotonic seconds."""

    __slots__ = ("error", "model", "origin", "started", "streams")

    def __init__(self, started: float, origin: str = "") -> None:
        """`origin`: address of the client."""
        self.started = started
        self.origin = origin
        self.model = ""  # name of the model or adapter, once it is known
        self.streams: list[RequestStream] = []
        self.error: Exception | None = None  # error that ended a streamed answer

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
        """True if all engine requests have finished."""
        return all(stream.state.is_finished for stream in self.streams)

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
        """Mean over sequences."""
        each = [
            (s.last_token - s.first_token) / (s.num_tokens - 1)
            for stream in self.streams
            for s in stream.state.sequences
            if s.num_tokens > 1
        ]
        return sum(each) / len(each) if each else None


current_stats: ContextVar[RequestStats | None] = ContextVar("current_stats", default=None)
"""Statistics of the HTTP request of the current task."""


def observe_first_token(metrics: Metrics, stream: RequestStream, now: float) -> None:
    """Record the first token of a request."""
    metrics.time_to_first_token.observe(now - stream.arrival)
    metrics.observe_prompt(len(stream.state.prompt_token_ids), stream.state.num_cached_tokens)


def observe_sequence_end(
    metrics: Metrics, sequence: SequenceState, stream: RequestStream | None, reason: str, now: float
) -> None:
    """Record the end of a sequence and, after its last one, of the request."""
    metrics.request_generation_tokens.observe(sequence.num_tokens)
    metrics.request_num_preemptions.observe(sequence.num_preemptions)
    if sequence.num_tokens > 1:
        seconds = sequence.last_token - sequence.first_token
        metrics.time_per_output_token.observe(seconds / (sequence.num_tokens - 1))
    if stream is None or not stream.state.is_finished:
        return
    metrics.count_finished(reason)
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
