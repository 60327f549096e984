"""Overview page: throughput, load, cache, GPU and latencies."""

from toolkit.top import wording
from toolkit.top.drawing.draw import bar, chart, sparkline, time_axis, usage_style
from toolkit.top.drawing.paint import (
    Block,
    Line,
    cut_middle,
    heading,
    side_by_side,
    split_width,
    spread,
)
from toolkit.top.pages.page import Page
from toolkit.top.readings.server import Point
from toolkit.top.state import State
from toolkit.top.view import View

NAME = 9  # columns of a fact's name
MIN_PANEL = 24  # columns of a panel of facts
FACTS_HEIGHT = 5
LATENCY_HEIGHT = 7
TALL = 36  # least height for a second row of charts
LATENCY_COLUMNS = ("p50", "p90", "p99", "mean", "count")


class OverviewPage(Page):
    """Rates, charts, facts and latencies of the shown servers."""

    title = "Overview"

    def draw(self, state: State, width: int, height: int) -> Block:
        return overview(state.view, width, height)


def overview(view: View, width: int, height: int) -> Block:
    """Draw the page in `width` columns and `height` lines."""
    charts = height - FACTS_HEIGHT - LATENCY_HEIGHT
    upper = charts if height < TALL else (charts + 1) // 2
    lines = _throughput(view, width, upper)
    if upper < charts:
        lines += _load(view, width, charts - upper)
    return [*lines, *_facts(view, width), *_latencies(view, width)][:height]


def _throughput(view: View, width: int, height: int) -> Block:
    left, right = split_width(width, 2)
    generation = (view.generation_rate, view.mean_generation_rate)
    prompts = (view.prompt_rate, view.mean_prompt_rate)
    return side_by_side(
        (_rate(view, "Generation", generation, "generation", "gen", left, height), left),
        (_rate(view, "Prompts", prompts, "prompt", "prompt", right, height), right),
    )


def _rate(
    view: View, title: str, rates: tuple[Point, Point], name: str, hue: str, width: int, height: int
) -> Block:
    """Draw a heading, the current rate, its mean and peak, and a chart of `name`."""
    now, mean = rates
    points = view.points.get(name, [])
    peak = max((point for point in points[-width:] if point is not None), default=None)
    value: Line = [(wording.decimal(now), f"value {hue}"), (" tok/s", "dim")]
    note: Line = [(f"mean {wording.short(mean)}  peak {wording.short(peak)}", "dim")]
    head: Block = [heading(title, width), spread(value, note, width)]
    return head + _plot(view, name, hue, width, height - len(head))


def _plot(
    view: View, name: str, hue: str, width: int, height: int, top: float | None = None
) -> Block:
    """Draw a chart, with a time axis if it is high enough."""
    has_axis = height >= 8
    lines = chart(view.points.get(name, []), width, height - has_axis, hue, top)
    return [*lines, time_axis(view.ages, width)] if has_axis else lines


def _load(view: View, width: int, height: int) -> Block:
    """Draw charts of the load: running, waiting, KV cache, power."""
    shown = [
        ("Running", wording.count(view.running), "running", "run", None),
        ("Waiting", wording.count(view.waiting), "waiting", "wait", None),
        ("KV cache", wording.percent(view.kv_usage), "kv", "kv", 1.0),
    ]
    if view.gpu_power is not None:
        shown.append(
            ("Power", f"{wording.count(view.gpu_power)} W", "power", "power", view.gpu_power_limit)
        )
    widths = split_width(width, len(shown))
    blocks = []
    for (title, value, name, hue, top), size in zip(shown, widths, strict=True):
        head: Block = [heading(title, size), [(value, f"value {hue}")]]
        blocks.append((head + _plot(view, name, hue, size, height - len(head), top), size))
    return side_by_side(*blocks)


def _facts(view: View, width: int) -> Block:
    """Draw panels of numbers, as many as fit."""
    panels = [_requests, _cache]
    if view.gpu_utilization is not None or view.gpu_power is not None:
        panels.append(_gpu)
    if view.adapters:
        panels.append(_adapters)
    if view.audio_seconds:
        panels.append(_sound)
    elif view.pictures:
        panels.append(_pictures)
    panels += [_steps, _processes] if view.cpu_cores else [_steps]
    panels.append(_finished)
    fitting = max(1, min(len(panels), (width + 2) // (MIN_PANEL + 2)))
    widths = split_width(width, fitting)
    return side_by_side(
        *((panel(view, size), size) for panel, size in zip(panels, widths, strict=False))
    )


def _panel(title: str, width: int, *facts: tuple[str, Line]) -> Block:
    lines: Block = [[(f"{name:<{NAME}}", "dim"), *value] for name, value in facts]
    return [heading(title, width), *lines]


def _trend(
    value: str, points: list[Point], width: int, style: str = "value", digits: int = 6
) -> Line:
    """Draw a number and its history."""
    return [(f"{value:>{digits}} ", style), *sparkline(points, max(0, width - NAME - digits - 1))]


def _share(value: float | None, width: int, style: str | None = None) -> Line:
    size = width - NAME - 6
    return [
        *bar(value, size, usage_style(value) if style is None else style),
        (f"{wording.percent(value, 0):>6}", "value"),
    ]


def _requests(view: View, width: int) -> Block:
    waiting = "value warn" if view.waiting else "value"
    return _panel(
        "Requests",
        width,
        ("running", _trend(wording.count(view.running), view.points.get("running", []), width)),
        (
            "waiting",
            _trend(wording.count(view.waiting), view.points.get("waiting", []), width, waiting),
        ),
        (
            "finished",
            _trend(
                wording.decimal(view.mean_finished_rate), view.points.get("finished", []), width
            ),
        ),
        ("batch", _trend(wording.decimal(view.batch_size), view.points.get("batch", []), width)),
    )


def _cache(view: View, width: int) -> Block:
    recent = view.recent_preemptions
    preempted: Line = [(f"{wording.short(view.preemptions):>6}", "value")]
    if recent:
        lately = f"  {wording.count(recent)} in {wording.duration(view.span)}"
        preempted.append(
            (lately if len(lately) + NAME + 6 <= width else f"  +{wording.short(recent)}", "warn")
        )
    return _panel(
        "KV cache",
        width,
        ("used", _share(view.kv_usage, width)),
        ("hits", _share(view.prefix_hit_rate, width, "bar")),
        ("preempted", preempted),
        (
            "refused",
            [
                (
                    f"{wording.short(sum(view.rejected.values())):>6}",
                    "value warn" if view.rejected else "value",
                )
            ],
        ),
    )


def _pictures(view: View, width: int) -> Block:
    return _panel(
        "Pictures",
        width,
        ("per sec.", [(f"{wording.decimal(view.picture_rate):>6}", "value")]),
        ("shared", _share(view.picture_hit_rate, width, "bar")),
        ("in all", [(f"{wording.short(view.pictures):>6}", "value")]),
    )


def _sound(view: View, width: int) -> Block:
    speed: Line = [(f"{wording.decimal(view.audio_rate):>6}", "value"), (" x real time", "")]
    return _panel(
        "Sound",
        width,
        ("speed", speed),
        ("shared", _share(view.picture_hit_rate, width, "bar")),
        ("seconds", [(f"{wording.short(view.audio_seconds):>6}", "value")]),
    )


def _gpu(view: View, width: int) -> Block:
    memory = None
    if view.gpu_memory_used is not None and view.gpu_memory_total:
        memory = view.gpu_memory_used / view.gpu_memory_total
    power: Line = [(f"{wording.count(view.gpu_power)} W", "value")]
    if view.gpu_power_limit and view.gpu_power is not None:
        share = view.gpu_power / view.gpu_power_limit
        power = [
            *bar(share, width - NAME - 6, usage_style(share)),
            (f"{wording.count(view.gpu_power):>4} W", "value"),
        ]
    return _panel(
        "GPU",
        width,
        ("busy", _share(view.gpu_utilization, width, "bar")),
        ("memory", _share(memory, width, "bar")),
        ("power", power),
        ("tokens/J", [(f"{wording.decimal(view.tokens_per_joule):>6}", "value")]),
    )


def _steps(view: View, width: int) -> Block:
    return _panel(
        "Steps",
        width,
        ("per sec.", [(f"{wording.decimal(view.steps_rate):>6}", "value")]),
        ("tokens", [(f"{wording.decimal(view.step_tokens):>6}", "value"), (" in each", "dim")]),
        ("requests", [(f"{wording.decimal(view.batch_size):>6}", "value"), (" in each", "dim")]),
        *(
            [("drafts", [(f"  {drafts}", "value")])]
            if (drafts := wording.drafts(view.draft_acceptance, view.acceptance_by_position))
            else []
        ),
    )


def _processes(view: View, width: int) -> Block:
    rows = sorted(view.cpu_cores.items(), key=lambda one: -one[1])[: FACTS_HEIGHT - 1]
    return _panel(
        "Processes",
        width,
        *(
            (
                name,
                [
                    (f"{cores:>6.2f}", "value"),
                    (" cores ", "dim"),
                    (wording.size(view.memory.get(name)), ""),
                ],
            )
            for name, cores in rows
        ),
    )


def _finished(view: View, width: int) -> Block:
    rows = sorted(view.finished.items(), key=lambda one: -one[1])[: FACTS_HEIGHT - 1]
    total = sum(view.finished.values())
    return _panel(
        "Since the start",
        width,
        *(
            (name, [(f"{wording.count(n):>9} ", "value"), (wording.percent(n / total), "dim")])
            for name, n in rows
        ),
    )


def _adapters(view: View, width: int) -> Block:
    """Draw the adapters with the most requests. The last line counts the others."""
    rows = sorted(view.adapters.items(), key=lambda one: (-sum(one[1]), one[0]))
    shown = rows if len(rows) < FACTS_HEIGHT else rows[: FACTS_HEIGHT - 2]
    size = max(0, width - 16)
    lines: Block = [
        [
            (f"{cut_middle(name, size):<{size}}", ""),
            (f"{wording.count(running):>6}", "value"),
            (" run ", "dim"),
            (f"+{wording.count(waiting)}" if waiting else "", "warn"),
        ]
        for name, (running, waiting) in shown
    ]
    if len(rows) > len(shown):
        lines.append([(f"and {len(rows) - len(shown)} more in memory", "dim")])
    return [heading("Adapters", width), *lines]


def _latencies(view: View, width: int) -> Block:
    """Draw a table of latencies and the history of their medians."""
    size = 10
    numbers = NAME + size * len(LATENCY_COLUMNS)
    trend = width - numbers - 2
    head: Line = [(" " * NAME, ""), *((f"{title:>{size}}", "dim") for title in LATENCY_COLUMNS)]
    if trend > 12:
        head.append(("  " + "p50 over time", "dim"))
    lines: Block = [heading(f"Latency, {wording.span(view.span)}", width), head]
    for name in ("TTFT", "ITL", "TPOT", "E2E", "queue"):
        found = view.latencies.get(name)
        values = [] if found is None else [found.p50, found.p90, found.p99, found.mean]
        cells = [wording.seconds(value) for value in values] or [wording.NOTHING] * 4
        cells.append(wording.short(found.count if found is not None else None))
        line: Line = [(f"{name:<{NAME}}", "dim")]
        styles = ("value", "", "value", "", "dim")
        line += [(f"{cell:>{size}}", style) for cell, style in zip(cells, styles, strict=True)]
        lines.append([*line, ("  ", ""), *sparkline(view.points.get(name, []), max(0, trend))])
    return lines
