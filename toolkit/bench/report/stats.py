"""Statistics of a run's records. Times are in seconds, lengths in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.bench.load.record import ClientResult, Floats, RequestRecord
from toolkit.bench.report.saturation import client_saturation
from toolkit.bench.report.steady import (
    TimeWindow,
    batch_edges,
    in_flight,
    rate,
    steady_window,
    tokens_between,
)
from toolkit.bench.report.summary import PERCENTILES, IntervalEstimate, Summary

Values = Floats | tuple[float, ...]

NUM_BLOCKS = 20
"""Consecutive parts of a run for confidence intervals, by the method of batch means: requests that
run at the same time are correlated."""
MIN_BLOCK_SIZE = 2  # requests per block. In a shorter run each request is a block


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Requests that failed for the same cause, with one message as an example."""

    cause: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies from the schedule, to avoid coordinated omission. `service_`: from sending."""

    ttft: Summary | None
    service_ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None  # between tokens; a chunk's gap is spread over its tokens
    chunk_gap: Summary | None  # between chunks of any size
    e2el: Summary | None
    service_e2el: Summary | None

    @classmethod
    def of(cls, records: Iterable[RequestRecord], percentiles: Sequence[float]) -> Latencies:
        """Summarize the requests that succeeded."""
        done = sorted((r for r in records if r.ok), key=lambda r: r.scheduled)
        count = NUM_BLOCKS if len(done) >= MIN_BLOCK_SIZE * NUM_BLOCKS else max(len(done), 1)
        blocks = [done[i * len(done) // count : (i + 1) * len(done) // count] for i in range(count)]

        answered = [[r for r in block if r.first_token is not None] for block in blocks]

        def summary(
            blocks: list[list[RequestRecord]], values: Callable[[RequestRecord], Values]
        ) -> Summary | None:
            groups = [np.concatenate([*map(values, block), ()]) for block in blocks]
            return Summary.of(groups, percentiles)

        return cls(
            ttft=summary(answered, lambda r: (r.ttft,)),
            service_ttft=summary(answered, lambda r: (r.service_ttft,)),
            tpot=summary(answered, lambda r: (tpot,) if (tpot := r.tpot) is not None else ()),
            itl=summary(answered, RequestRecord.token_gaps),
            chunk_gap=summary(answered, lambda r: np.frombuffer(r.chunk_gaps)),
            e2el=summary(blocks, lambda r: (r.e2el,)),
            service_e2el=summary(blocks, lambda r: (r.service_e2el,)),
        )


@dataclass(frozen=True, slots=True)
class Steady:
    """Statistics of the steady part of a run. Latencies are of requests scheduled in the window."""

    window: TimeWindow
    in_flight: float
    requests_per_s: IntervalEstimate
    output_tokens_per_s: IntervalEstimate
    latencies: Latencies


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run. Token counts are those of the requests that succeeded."""

    wall: float  # from the first scheduled arrival to the last end
    num_sent: int
    num_succeeded: int
    num_failed: int
    num_unfinished: int
    num_good: int | None  # requests that met the objectives; None without objectives
    max_in_flight: int
    offered_rate: float | None  # scheduled requests per second; None if fewer than two
    sent_rate: float | None  # sent requests per second
    prompt_tokens: int
    cached_tokens: int | None  # prompt tokens from the cache; None if not reported
    output_tokens: int
    output_tokens_asked: int
    chunks: int
    has_token_counts: bool  # False: the server did not report the tokens of each chunk
    latencies: Latencies
    steady: Steady | None
    send_lag: Summary | None  # from the scheduled arrival until the client began with the request
    place_wait: Summary | None  # from then until fewer than --max-concurrency were in flight
    loop_delay: Summary | None
    num_clients: int  # processes
    cpu_share: float  # of one core, for the busiest client
    saturated: str | None  # why a client was the bottleneck
    errors: tuple[ErrorGroup, ...]

    def per_second(self, amount: float) -> float:
        return amount / self.wall if self.wall > 0 else 0.0

    @property
    def good_share(self) -> float | None:
        """Fraction of the requests that ended."""
        ended = self.num_succeeded + self.num_failed
        return None if self.num_good is None or not ended else self.num_good / ended


def evaluate(
    clients: Sequence[ClientResult],
    *,
    is_paced: bool,
    percentiles: Sequence[float] = PERCENTILES,
    objectives: Mapping[str, float] | None = None,
    is_steady_load: bool = True,
) -> RunResult:
    """Compute the result of a run.

    `is_paced`: arrivals had a schedule, so that a late send matters. `objectives`: limits of a good
    request in seconds, by metric. `is_steady_load`: the load was not a ramp."""
    records = [record for client in clients for record in client.records]
    done = [r for r in records if r.ok]
    sent = [r for r in records if r.sent is not None]
    answered = [r for r in done if r.first_token is not None]
    wall = max((r.ended for r in records if r.ended is not None), default=0.0) - min(
        (r.scheduled for r in records), default=0.0
    )
    cached = [r.cached_tokens for r in done if r.cached_tokens is not None]
    delays = [np.frombuffer(client.loop_delays) for client in clients if client.loop_delays]
    saturations = (client_saturation(client, wall, is_paced=is_paced) for client in clients)
    return RunResult(
        wall=max(0.0, wall),
        num_sent=len(sent),
        num_succeeded=len(done),
        num_failed=sum(r.error is not None for r in records),
        num_unfinished=sum(r.ended is None for r in sent),
        num_good=sum(is_good(r, objectives) for r in done) if objectives else None,
        max_in_flight=max_in_flight(records),
        offered_rate=rate_of([r.scheduled for r in sent]) if is_paced else None,
        sent_rate=rate_of([r.sent for r in sent if r.sent is not None]),
        prompt_tokens=sum(r.prompt_tokens for r in done),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(r.output_tokens for r in done),
        output_tokens_asked=sum(r.max_tokens for r in done),
        chunks=sum(len(r.chunk_gaps) + 1 for r in answered),
        has_token_counts=all(r.has_token_counts for r in answered),
        latencies=Latencies.of(done, percentiles),
        steady=steady_state(records, percentiles) if is_steady_load else None,
        send_lag=Summary.each([r.started - r.scheduled for r in sent if r.started is not None]),
        place_wait=Summary.each(
            [r.sent - r.started for r in sent if r.sent is not None and r.started is not None]
        ),
        loop_delay=Summary.each(np.concatenate(delays)) if delays else None,
        num_clients=len(clients),
        cpu_share=max((client.cpu_share for client in clients), default=0.0),
        saturated=next(filter(None, saturations), None),
        errors=group_errors(records),
    )


def steady_state(records: Sequence[RequestRecord], percentiles: Sequence[float]) -> Steady | None:
    """Return the statistics of the steady part of a run, or None if there is none."""
    window = steady_window(records)
    if window is None:
        return None
    edges = batch_edges(window)
    ends = [r.ended for r in records if r.ok and r.ended is not None]
    return Steady(
        window=window,
        in_flight=float(in_flight(records, edges).mean()),
        requests_per_s=rate(np.histogram(ends, edges)[0].astype(np.float64), window.seconds),
        output_tokens_per_s=rate(tokens_between(records, edges), window.seconds),
        latencies=Latencies.of((r for r in records if r.scheduled in window), percentiles),
    )


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Return True if a successful request met every objective. One token alone has a TPOT of 0."""
    found = {
        "ttft": record.ttft if record.first_token is not None else record.e2el,
        "tpot": record.tpot or 0.0,
        "e2el": record.e2el,
    }
    return all(found[name] <= limit for name, limit in objectives.items())


def max_in_flight(records: Iterable[RequestRecord]) -> int:
    """Return the highest number of requests in flight."""
    steps = [(r.sent, 1) for r in records if r.sent is not None]
    steps += [(r.ended, -1) for r in records if r.sent is not None and r.ended is not None]
    return int(np.cumsum([step for _, step in sorted(steps)]).max(initial=0))


def rate_of(times: Sequence[float]) -> float | None:
    """Return the events per second from the first to the last."""
    span = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def group_errors(records: Iterable[RequestRecord]) -> tuple[ErrorGroup, ...]:
    """Group failures by cause, the most frequent first, each with its first example."""
    found: dict[str, list[str]] = {}
    for cause, example in (r.error for r in records if r.error is not None):
        found.setdefault(cause, []).append(example)
    groups = [ErrorGroup(cause, len(examples), examples[0]) for cause, examples in found.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))
