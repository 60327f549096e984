"""From records to a result. Pure functions; seconds and tokens throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.bench.load.record import Floats, RequestRecord, Share
from toolkit.bench.report.saturation import share_saturation
from toolkit.bench.report.steady import (
    Window,
    batch_edges,
    in_flight,
    rate,
    steady_window,
    tokens_between,
)
from toolkit.bench.report.summary import PERCENTILES, Estimate, Summary

Values = Floats | tuple[float, ...]

BLOCKS = 20
"""Parts of a run, one after the other, that intervals of confidence are taken from: requests that run at the same time
resemble each other, so that many of them tell less than their number (the method of batch means).
"""
SMALLEST_BLOCK = 2
"""Requests: in shorter runs each one counts for itself."""


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Requests that failed for one cause, and one of them in words."""

    cause: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Latencies:
    """Without `service_` they count from the scheduled arrival, so that waiting which a slow server caused is part of
    them (otherwise it is left out by those very requests that had to wait: coordinated omission).
    """

    ttft: Summary | None
    service_ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    """Between tokens; a chunk's gap is spread over its tokens."""
    chunk_gap: Summary | None
    """Between chunks, whatever they carry."""
    e2el: Summary | None
    service_e2el: Summary | None

    @classmethod
    def of(cls, records: Iterable[RequestRecord], percentiles: Sequence[float]) -> Latencies:
        """Of those that succeeded."""
        done = sorted((r for r in records if r.ok), key=lambda r: r.scheduled)
        count = BLOCKS if len(done) >= SMALLEST_BLOCK * BLOCKS else max(len(done), 1)
        blocks = [done[i * len(done) // count : (i + 1) * len(done) // count] for i in range(count)]

        answered = [[r for r in block if r.first_token is not None] for block in blocks]

        def summary(
            blocks: list[list[RequestRecord]], values: Callable[[RequestRecord], Values]
        ) -> Summary | None:
            """Of what each request has, by block."""
            groups = [np.concatenate([*map(values, block), ()]) for block in blocks]
            return Summary.of(groups, percentiles)

        return cls(
            ttft=summary(answered, lambda r: (r.ttft,)),
            service_ttft=summary(answered, lambda r: (r.service_ttft,)),
            tpot=summary(answered, lambda r: (tpot,) if (tpot := r.tpot) is not None else ()),
            itl=summary(answered, RequestRecord.token_gaps),
            chunk_gap=summary(answered, lambda r: np.frombuffer(r.gaps)),
            e2el=summary(blocks, lambda r: (r.e2el,)),
            service_e2el=summary(blocks, lambda r: (r.service_e2el,)),
        )


@dataclass(frozen=True, slots=True)
class Steady:
    """What happened while the load was steady. Latencies are those of requests scheduled in that time."""

    window: Window
    in_flight: float
    requests_per_s: Estimate
    output_tokens_per_s: Estimate
    latencies: Latencies


@dataclass(frozen=True, slots=True)
class Result:
    """What a run measured. Tokens are those of the requests that succeeded."""

    wall: float  # from the first scheduled arrival to the last end
    num_sent: int
    num_succeeded: int
    num_failed: int
    num_unfinished: int
    num_good: int | None  # those that kept the objectives; None when there are none
    max_in_flight: int
    offered_rate: (
        float | None
    )  # requests per second by the schedule; None without one, or with less than two
    sent_rate: float | None  # requests per second that were really sent
    prompt_tokens: int
    cached_tokens: int | None  # of the prompts; None when the server does not say
    output_tokens: int
    output_tokens_asked: int
    chunks: int
    sizes_known: (
        bool  # False: chunks carried several tokens, and the server does not say how many each
    )
    latencies: Latencies
    steady: Steady | None
    send_lag: Summary | None  # how late the client came to a request
    place_wait: Summary | None  # how long a request then waited for one of --max-concurrency places
    loop_delay: Summary | None
    num_clients: int  # processes
    cpu_share: float  # of one core, of the busiest client
    saturated: str | None  # why a client was the bottleneck, or None
    errors: tuple[ErrorGroup, ...]

    def per_second(self, amount: float) -> float:
        return amount / self.wall if self.wall > 0 else 0.0

    @property
    def good_share(self) -> float | None:
        """Of the requests that were sent and ended."""
        ended = self.num_succeeded + self.num_failed
        return None if self.num_good is None or not ended else self.num_good / ended


def evaluate(
    shares: Sequence[Share],
    *,
    paced: bool,
    percentiles: Sequence[float] = PERCENTILES,
    objectives: Mapping[str, float] | None = None,
    settles: bool = True,
) -> Result:
    """The result of a run, of what its clients did. `paced`: the arrivals followed a clock, so that lateness means
    something. `objectives`: most seconds of a good request, by metric. `settles`: the load was not meant to change all
    the time.
    """
    records = [record for share in shares for record in share.records]
    done = [r for r in records if r.ok]
    sent = [r for r in records if r.sent is not None]
    answered = [r for r in done if r.first_token is not None]
    wall = max((r.ended for r in records if r.ended is not None), default=0.0) - min(
        (r.scheduled for r in records), default=0.0
    )
    cached = [r.cached_tokens for r in done if r.cached_tokens is not None]
    delays = [np.frombuffer(share.loop_delays) for share in shares if share.loop_delays]
    return Result(
        wall=max(0.0, wall),
        num_sent=len(sent),
        num_succeeded=len(done),
        num_failed=sum(r.error is not None for r in records),
        num_unfinished=sum(r.ended is None for r in sent),
        num_good=sum(is_good(r, objectives) for r in done) if objectives else None,
        max_in_flight=max_in_flight(records),
        offered_rate=rate_of([r.scheduled for r in sent]) if paced else None,
        sent_rate=rate_of([r.sent for r in sent if r.sent is not None]),
        prompt_tokens=sum(r.prompt_tokens for r in done),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(r.output_tokens for r in done),
        output_tokens_asked=sum(r.max_tokens for r in done),
        chunks=sum(len(r.gaps) + 1 for r in answered),
        sizes_known=all(r.sizes_known for r in answered),
        latencies=Latencies.of(done, percentiles),
        steady=steady_state(records, percentiles) if settles else None,
        send_lag=Summary.each([r.woken - r.scheduled for r in sent if r.woken is not None]),
        place_wait=Summary.each(
            [r.sent - r.woken for r in sent if r.sent is not None and r.woken is not None]
        ),
        loop_delay=Summary.each(np.concatenate(delays)) if delays else None,
        num_clients=len(shares),
        cpu_share=max((share.cpu_share for share in shares), default=0.0),
        saturated=next(
            filter(None, (share_saturation(share, wall, paced=paced) for share in shares)), None
        ),
        errors=group_errors(records),
    )


def steady_state(records: Sequence[RequestRecord], percentiles: Sequence[float]) -> Steady | None:
    """The steady part of a run; None when it never settled."""
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
    """Whether a request that succeeded kept every objective; one token alone has no time per further one."""
    found = {
        "ttft": record.ttft if record.first_token is not None else record.e2el,
        "tpot": record.tpot or 0.0,
        "e2el": record.e2el,
    }
    return all(found[name] <= most for name, most in objectives.items())


def max_in_flight(records: Iterable[RequestRecord]) -> int:
    """Most requests that were in flight at one moment."""
    steps = [(r.sent, 1) for r in records if r.sent is not None]
    steps += [(r.ended, -1) for r in records if r.sent is not None and r.ended is not None]
    return int(np.cumsum([step for _, step in sorted(steps)]).max(initial=0))


def rate_of(times: Sequence[float]) -> float | None:
    """Per second, from the first to the last."""
    span = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def group_errors(records: Iterable[RequestRecord]) -> tuple[ErrorGroup, ...]:
    """The failures by cause, the most frequent first, each with its first example."""
    found: dict[str, list[str]] = {}
    for cause, example in (r.error for r in records if r.error is not None):
        found.setdefault(cause, []).append(example)
    groups = [ErrorGroup(cause, len(examples), examples[0]) for cause, examples in found.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))
