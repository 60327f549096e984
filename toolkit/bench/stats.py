"""From records to a result. Pure functions; seconds and tokens throughout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from toolkit.bench.record import RequestRecord, Share

LATE = 0.010  # seconds: at rates worth measuring, a client this late distorts what it measures
BUSY = 0.95  # share of one core: one event loop has no more than one
SETTLED = 1.0  # seconds: in shorter runs the opening burst alone looks like a busy client


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """None when there are no values. Percentiles interpolate linearly between the two nearest ranks."""
        found = np.fromiter(values, dtype=np.float64)
        if found.size == 0:
            return None
        p50, p90, p99 = np.percentile(found, (50, 90, 99))
        return cls(float(found.mean()), float(p50), float(p90), float(p99), float(found.max()), found.size)


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Requests that failed for one cause, and one of them in words."""

    cause: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a run measured. Latencies without `_from_send` count from the scheduled arrival, so that waiting
    which a slow server caused is part of them; tokens are those of the requests that succeeded."""

    wall: float  # from the first scheduled arrival to the last end
    num_sent: int
    num_succeeded: int
    num_failed: int
    num_unfinished: int
    max_in_flight: int
    send_rate: float | None  # requests per second; None when fewer than two were sent
    prompt_tokens: int
    output_tokens: int
    output_tokens_asked: int
    ttft: Summary | None
    ttft_from_send: Summary | None
    tpot: Summary | None
    itl: Summary | None
    itl_per_token: bool  # False: some gaps are between pieces of the answer of unknown size
    e2e: Summary | None
    e2e_from_send: Summary | None
    send_lag: Summary | None  # how late the client came to a request
    place_wait: Summary | None  # how long a request then waited for one of --max-concurrency places
    loop_delay: Summary | None
    num_clients: int  # processes
    cpu_share: float  # of one core, of the busiest client
    saturated: str | None  # why a client was the bottleneck, or None
    errors: tuple[ErrorGroup, ...]

    def per_second(self, amount: float) -> float:
        return amount / self.wall if self.wall > 0 else 0.0


def evaluate(shares: Sequence[Share], *, paced: bool) -> Result:
    """The result of a run, of what its clients did. `paced`: the arrivals followed a clock, so that lateness means
    something.
    """
    records = [record for share in shares for record in share.records]
    done = [r for r in records if r.ok]
    sent = [r for r in records if r.sent is not None]
    answered = [r for r in done if r.first_token is not None]
    wall = max((r.ended for r in records if r.ended is not None), default=0.0) - min(
        (r.scheduled for r in records), default=0.0
    )
    return Result(
        wall=max(0.0, wall),
        num_sent=len(sent),
        num_succeeded=len(done),
        num_failed=sum(r.error is not None for r in records),
        num_unfinished=sum(r.ended is None for r in sent),
        max_in_flight=max_in_flight(records),
        send_rate=send_rate(sent),
        prompt_tokens=sum(r.prompt_tokens for r in done),
        output_tokens=sum(r.output_tokens for r in done),
        output_tokens_asked=sum(r.max_tokens for r in done),
        ttft=Summary.of(_since(r.first_token, r.scheduled) for r in answered),
        ttft_from_send=Summary.of(_since(r.first_token, r.sent) for r in answered),
        tpot=Summary.of(time_per_output_token(r) for r in answered if r.output_tokens > 1),
        itl=Summary.of(chain.from_iterable(r.gaps for r in answered)),
        itl_per_token=all(r.gaps_per_token for r in answered),
        e2e=Summary.of(_since(r.ended, r.scheduled) for r in done),
        e2e_from_send=Summary.of(_since(r.ended, r.sent) for r in done),
        send_lag=send_lag(records),
        place_wait=Summary.of(_since(r.sent, r.woken) for r in sent),
        loop_delay=Summary.of(chain.from_iterable(share.loop_delays for share in shares)),
        num_clients=len(shares),
        cpu_share=max((share.cpu_share for share in shares), default=0.0),
        saturated=next(filter(None, (share_saturation(share, wall, paced=paced) for share in shares)), None),
        errors=group_errors(records),
    )


def send_lag(records: Iterable[RequestRecord]) -> Summary | None:
    """How late the client came to its requests."""
    return Summary.of(r.woken - r.scheduled for r in records if r.sent is not None and r.woken is not None)


def share_saturation(share: Share, wall: float, *, paced: bool) -> str | None:
    """Why this client, not the server, was a bottleneck; None when it was not."""
    lag = send_lag(share.records) if paced else None
    return saturation(lag, Summary.of(share.loop_delays), share.cpu_share, wall)


def time_per_output_token(record: RequestRecord) -> float:
    """Seconds per token after the first."""
    return _since(record.last_token, record.first_token) / (record.output_tokens - 1)


def saturation(
    send_lag: Summary | None, loop_delay: Summary | None, cpu_share: float, wall: float
) -> str | None:
    """Why the client, not the server, was the bottleneck; None when it was not.

    `send_lag` is None for runs whose arrivals follow no clock.
    """
    if send_lag is not None and send_lag.p90 > LATE:
        return f"a tenth of the requests were sent more than {send_lag.p90 * 1e3:.0f} ms late"
    if wall < SETTLED:
        return None
    if cpu_share > BUSY:
        return f"it used {cpu_share:.0%} of its one core"
    if loop_delay is not None and loop_delay.p90 > LATE:
        return f"its event loop was often more than {loop_delay.p90 * 1e3:.0f} ms late"
    return None


def max_in_flight(records: Iterable[RequestRecord]) -> int:
    """Most requests that were in flight at one moment."""
    steps = [(r.sent, 1) for r in records if r.sent is not None]
    steps += [(r.ended, -1) for r in records if r.sent is not None and r.ended is not None]
    return int(np.cumsum([step for _, step in sorted(steps)]).max(initial=0))


def send_rate(sent: Sequence[RequestRecord]) -> float | None:
    """Requests per second that were really sent."""
    times = [r.sent for r in sent if r.sent is not None]
    span = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def group_errors(records: Iterable[RequestRecord]) -> tuple[ErrorGroup, ...]:
    """The failures by cause, the most frequent first, each with its first example."""
    found: dict[str, list[str]] = {}
    for record in records:
        if record.error is not None:
            found.setdefault(record.error[0], []).append(record.error[1])
    groups = [ErrorGroup(cause, len(examples), examples[0]) for cause, examples in found.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))


def _since(end: float | None, start: float | None) -> float:
    assert end is not None
    assert start is not None
    return end - start
