"""Every number on the screen: of one server, or of several together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from toolkit.top.readings.arithmetic import Latency, latency, mean, requests_per_step
from toolkit.top.readings.server import LATENCIES, RATES, Point, Server
from toolkit.top.readings.window import Window, Windows, total_of

MEANS = {"kv", "gpu", "batch", *LATENCIES}
"""Points of several servers are added, these are averaged."""


@dataclass(frozen=True, slots=True)
class View:
    """None: the server does not say, or there is nothing to say yet. Rates are per second, shares from 0 to 1."""

    model: str = ""
    version: str = ""
    start_time: float | None = None  # seconds since 1970
    span: float | None = (
        None  # seconds that means and latencies are taken over; None: since the start
    )
    generation_rate: float | None = (
        None  # between the last two readings, as all that is called a rate
    )
    prompt_rate: float | None = None
    finished_rate: float | None = None
    mean_generation_rate: float | None = None  # over the span
    mean_prompt_rate: float | None = None
    mean_finished_rate: float | None = None
    running: float | None = None
    waiting: float | None = None
    finished: dict[str, float] = field(default_factory=dict)  # by reason, since the server's start
    rejected: float | None = None  # over the span
    prompt_tokens: float | None = None  # of a request, on average over the span
    output_tokens: float | None = None
    batch_size: float | None = None  # requests in a step, over the span
    step_tokens: float | None = None  # tokens in a step, over the span
    steps_rate: float | None = None  # over the span
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None  # over the span
    preemptions: float | None = None  # since the server's start
    recent_preemptions: float | None = None  # over the span
    gpu_memory_used: float | None = None  # bytes
    gpu_memory_total: float | None = None
    gpu_utilization: float | None = None
    gpu_power: float | None = None  # watts
    gpu_power_limit: float | None = None
    tokens_per_joule: float | None = (
        None  # generated over the span (since the start: now), at the power of now
    )
    cpu_cores: dict[str, float] = field(default_factory=dict)  # in use, by process, over the span
    memory: dict[str, float] = field(default_factory=dict)  # bytes, by process
    latencies: dict[str, Latency] = field(default_factory=dict)
    points: dict[str, list[Point]] = field(default_factory=dict)  # of the charts; the newest last
    ages: list[float] = field(default_factory=list)  # of the points, in seconds


def view_of(servers: Sequence[Server], *, since_start: bool = False) -> View:
    """The servers as if they were one; those that do not answer are left out, unless there is one alone.

    `since_start`: what is taken over the window is taken over the servers' lives.
    """
    shown = _that_answer(servers)
    pairs = [
        (None if since_start else one.first, one.last) for one in shown if one.last is not None
    ]
    windows = [Window(old, new) for old, new in pairs]
    if not windows:
        return View()
    all_of = Windows(windows)
    now = {
        name: total_of(one.points[name][-1] for one in shown if one.points[name]) for name in RATES
    }
    power = all_of.sum("gpu_power_watts")
    generated = all_of.rate("generation_tokens_total")
    made = now["generation"] if since_start else generated
    steps = all_of.observed("iteration_tokens_total")
    batch = all_of.observed("iteration_num_requests")
    queries = all_of.increase("prefix_cache_queries_total")
    hits = all_of.increase("prefix_cache_hits_total")
    return View(
        model=", ".join(sorted({window.new.model for window in windows} - {""})),
        version=", ".join(sorted({window.new.version for window in windows} - {""})),
        start_time=min(
            (one.new.start_time for one in windows if one.new.start_time is not None), default=None
        ),
        span=None if since_start else max(window.seconds for window in windows),
        generation_rate=now["generation"],
        prompt_rate=now["prompt"],
        finished_rate=now["finished"],
        mean_generation_rate=generated,
        mean_prompt_rate=all_of.rate("prompt_tokens_total"),
        mean_finished_rate=all_of.rate("request_success_total"),
        running=all_of.sum("num_requests_running"),
        waiting=all_of.sum("num_requests_waiting"),
        finished={
            name: count for name, count in all_of.parts("request_success_total").items() if count
        },
        rejected=all_of.increase("admission_rejections_total"),
        prompt_tokens=mean(all_of.observed("request_prompt_tokens")),
        output_tokens=mean(all_of.observed("request_generation_tokens")),
        batch_size=requests_per_step(batch, steps, all_of.increase("generation_tokens_total")),
        step_tokens=mean(steps),
        steps_rate=steps.count / all_of.seconds if steps.count and all_of.seconds else None,
        kv_usage=all_of.mean("kv_cache_usage_perc"),
        prefix_hit_rate=hits / queries if hits is not None and queries else None,
        preemptions=all_of.sum("num_preemptions_total"),
        recent_preemptions=all_of.increase("num_preemptions_total"),
        gpu_memory_used=all_of.sum("gpu_memory_used_bytes"),
        gpu_memory_total=all_of.sum("gpu_memory_total_bytes"),
        gpu_utilization=all_of.mean("gpu_utilization_perc"),
        gpu_power=power,
        gpu_power_limit=all_of.sum("gpu_power_limit_watts"),
        tokens_per_joule=made / power if made is not None and power else None,
        cpu_cores=all_of.cores(),
        memory=all_of.parts("process_resident_memory_bytes"),
        latencies={title: latency(all_of.observed(name)) for title, name in LATENCIES.items()},
    )


def charted(view: View, servers: Sequence[Server]) -> View:
    """The view with the servers' points and their ages, which only what is looked at needs."""
    shown = [one for one in _that_answer(servers) if one.times]
    if not shown:
        return view
    points = {name: _points(name, [one.points[name] for one in shown]) for name in shown[0].points}
    return replace(view, points=points, ages=max((_ages(server) for server in shown), key=len))


def _that_answer(servers: Sequence[Server]) -> list[Server]:
    return list(servers) if len(servers) == 1 else [server for server in servers if server.is_up]


def _points(name: str, several: Sequence[Sequence[Point]]) -> list[Point]:
    """The points of several servers as those of one, aligned at the newest."""
    if len(several) == 1:
        return list(several[0])
    longest = max(map(len, several))
    unknown: list[Point] = [None]
    aligned = (unknown * (longest - len(points)) + list(points) for points in several)
    return [_one_point(points, is_mean=name in MEANS) for points in zip(*aligned, strict=True)]


def _one_point(points: tuple[Point, ...], *, is_mean: bool) -> Point:
    known = [point for point in points if point is not None]
    if not known:
        return None
    return sum(known) / len(known) if is_mean else sum(known)


def _ages(server: Server) -> list[float]:
    """Of its points, in seconds before the newest."""
    return [server.times[-1] - time for time in server.times]
