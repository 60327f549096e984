"""All numbers on the screen, for one server or several together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from toolkit.top.readings.arithmetic import Latency, mean, requests_per_step, summarize
from toolkit.top.readings.server import LATENCIES, RATES, Point, Server
from toolkit.top.readings.window import Window, Windows, sum_known

MEANS = {"kv", "gpu", "batch", *LATENCIES}  # averaged over servers; other points are added


@dataclass(frozen=True, slots=True)
class View:
    """Numbers of one or several servers. None: not reported, or not known yet.

    Rates are per second, shares from 0 to 1."""

    model: str = ""
    version: str = ""
    start_time: float | None = None  # seconds since 1970
    span: float | None = None  # seconds for means and latencies; None: since the start
    generation_rate: float | None = None  # between the last two readings, like all plain rates
    prompt_rate: float | None = None
    finished_rate: float | None = None
    mean_generation_rate: float | None = None  # over the span, like all means
    mean_prompt_rate: float | None = None
    mean_finished_rate: float | None = None
    running: float | None = None
    waiting: float | None = None
    finished: dict[str, float] = field(default_factory=dict)  # by reason, since the server's start
    adapters: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Requests that run and wait, for each LoRA adapter in memory."""
    rejected: dict[str, float] = field(default_factory=dict)  # by reason, over the span
    prompt_tokens: float | None = None  # mean per request, over the span
    output_tokens: float | None = None
    batch_size: float | None = None  # mean requests per step, over the span
    step_tokens: float | None = None  # mean tokens per step, over the span
    largest_steps: float | None = None  # 99th percentile of the tokens per step, over the span
    steps_rate: float | None = None  # over the span
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None  # over the span
    pictures: float | None = None  # that requests needed, since the server's start
    picture_rate: float | None = None  # per second, over the span
    picture_hit_rate: float | None = None  # computed for an earlier request, over the span
    audio_seconds: float | None = None  # seconds of sound transcribed since the server's start
    audio_rate: float | None = None  # seconds of sound per second, over the span
    draft_acceptance: float | None = None  # share of right draft tokens, over the span
    acceptance_by_position: list[float] = field(default_factory=list)
    """Share of steps with drafts whose first, second, … draft was right, since the start."""
    preemptions: float | None = None  # since the server's start
    recent_preemptions: float | None = None  # over the span
    gpu_memory_used: float | None = None  # bytes
    gpu_memory_total: float | None = None
    gpu_utilization: float | None = None
    gpu_power: float | None = None  # watts
    gpu_power_limit: float | None = None
    # Generated over the span (without one: between the last two readings), at the current power.
    tokens_per_joule: float | None = None
    cpu_cores: dict[str, float] = field(default_factory=dict)  # in use, by process, over the span
    memory: dict[str, float] = field(default_factory=dict)  # bytes, by process
    latencies: dict[str, Latency] = field(default_factory=dict)
    points: dict[str, list[Point]] = field(default_factory=dict)  # of charts, the newest last
    ages: list[float] = field(default_factory=list)  # of the points, in seconds


def view_of(servers: Sequence[Server], *, since_start: bool = False) -> View:
    """Combine servers into one view, without those that do not answer, unless it is the only one.

    `since_start`: means and latencies are since the servers' start, not over the window."""
    shown = _answering(servers)
    pairs = [
        (None if since_start else one.first, one.last) for one in shown if one.last is not None
    ]
    windows = [Window(old, new) for old, new in pairs]
    if not windows:
        return View()
    totals = Windows(windows)
    now = {
        name: sum_known(one.points[name][-1] for one in shown if one.points[name]) for name in RATES
    }
    power = totals.sum("gpu_power_watts")
    generated = totals.rate("generation_tokens_total")
    current = now["generation"] if since_start else generated
    steps = totals.histogram("iteration_tokens_total")
    batch = totals.histogram("iteration_num_requests")
    on_adapters, for_adapters = (
        totals.parts(f"lora_requests_{state}") for state in ("running", "waiting")
    )
    queries = totals.increase("prefix_cache_queries_total")
    hits = totals.increase("prefix_cache_hits_total")
    pictures = totals.increase("mm_cache_queries_total")
    shared = totals.increase("mm_cache_hits_total")
    drafted = totals.increase("spec_decode_num_draft_tokens_total")
    accepted = totals.increase("spec_decode_num_accepted_tokens_total")
    num_drafts = totals.sum("spec_decode_num_drafts_total")
    by_position = totals.parts("spec_decode_num_accepted_tokens_per_pos_total")
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
        mean_prompt_rate=totals.rate("prompt_tokens_total"),
        mean_finished_rate=totals.rate("request_success_total"),
        running=totals.sum("num_requests_running"),
        waiting=totals.sum("num_requests_waiting"),
        finished={
            name: count for name, count in totals.parts("request_success_total").items() if count
        },
        adapters={
            name: (count, for_adapters.get(name, 0.0)) for name, count in on_adapters.items()
        },
        rejected=totals.increase_of_parts("admission_rejections_total"),
        prompt_tokens=mean(totals.histogram("request_prompt_tokens")),
        output_tokens=mean(totals.histogram("request_generation_tokens")),
        batch_size=requests_per_step(batch, steps, totals.increase("generation_tokens_total")),
        step_tokens=mean(steps),
        largest_steps=summarize(steps).p99,
        steps_rate=steps.count / totals.seconds if steps.count and totals.seconds else None,
        kv_usage=totals.mean("kv_cache_usage_perc"),
        prefix_hit_rate=hits / queries if hits is not None and queries else None,
        pictures=totals.sum("mm_cache_queries_total"),
        picture_rate=totals.rate("mm_cache_queries_total"),
        audio_seconds=totals.sum("audio_seconds_total"),
        audio_rate=totals.rate("audio_seconds_total"),
        picture_hit_rate=shared / pictures if shared is not None and pictures else None,
        draft_acceptance=accepted / drafted if accepted is not None and drafted else None,
        acceptance_by_position=[
            count / num_drafts
            for _, count in sorted(by_position.items(), key=lambda one: int(one[0]))
        ]
        if num_drafts
        else [],
        preemptions=totals.sum("num_preemptions_total"),
        recent_preemptions=totals.increase("num_preemptions_total"),
        gpu_memory_used=totals.sum("gpu_memory_used_bytes"),
        gpu_memory_total=totals.sum("gpu_memory_total_bytes"),
        gpu_utilization=totals.mean("gpu_utilization_perc"),
        gpu_power=power,
        gpu_power_limit=totals.sum("gpu_power_limit_watts"),
        tokens_per_joule=current / power if current is not None and power else None,
        cpu_cores=totals.cores(),
        memory=totals.parts("process_resident_memory_bytes"),
        latencies={title: summarize(totals.histogram(name)) for title, name in LATENCIES.items()},
    )


def with_charts(view: View, servers: Sequence[Server]) -> View:
    """Add the points of the charts and their ages, which only the shown servers need."""
    shown = [one for one in _answering(servers) if one.times]
    if not shown:
        return view
    points = {name: _points(name, [one.points[name] for one in shown]) for name in shown[0].points}
    return replace(view, points=points, ages=max((_ages(server) for server in shown), key=len))


def _answering(servers: Sequence[Server]) -> list[Server]:
    return list(servers) if len(servers) == 1 else [server for server in servers if server.is_up]


def _points(name: str, several: Sequence[Sequence[Point]]) -> list[Point]:
    """Combine the points of several servers, aligned at the newest."""
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
    """Return the ages of a server's points, in seconds before the newest."""
    return [server.times[-1] - time for time in server.times]
