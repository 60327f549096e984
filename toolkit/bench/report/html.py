"""HTML report of a result: one file with plots that needs no network."""

from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from toolkit.bench.load.record import Floats, RequestRecord
from toolkit.bench.report.client_machine import environment
from toolkit.bench.report.document import settings
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.plots import Axis, Chart
from toolkit.bench.report.steady import in_flight, tokens_between
from toolkit.bench.report.summary import IntervalEstimate, Summary
from toolkit.bench.report.wording import (
    describe_client,
    describe_load,
    describe_prompts,
    describe_server,
    problems,
)

MIN_BINS, MAX_BINS = 20, 120
"""Bins of the timeline. Each has several requests, so that it shows the load and not noise."""
MAX_DOTS = 3000  # requests to draw as dots. A larger run is subsampled
TAIL = (10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)
"""Percentiles to draw. Those that need more values than there are get left out."""
TAIL_TICKS = (
    (1 / 0.9, "10"),
    (2.0, "50"),
    (10.0, "90"),
    (100.0, "99"),
    (1000.0, "99.9"),
    (10000.0, "99.99"),
)


def html_report(outcome: Outcome) -> str:
    title = f"{outcome.model}: {describe_load(outcome.config)}"
    charts = "".join(chart.svg() for chart in _charts(outcome))
    notes = "".join(
        f'<p class="note {"bad" if "red" in style else "warn"}">{escape(text)}</p>'
        for style, text in problems(outcome)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{_asset('report.css')}</style></head><body>"
        f"<header><h1>{escape(outcome.model)}</h1><p>{escape(describe_load(outcome.config))}; "
        f"{escape(describe_prompts(outcome.config))}</p>"
        f"<p class=dim>{escape(outcome.config.url)} · {outcome.began:%Y-%m-%d %H:%M:%S} UTC</p>"
        f"</header>{notes}"
        f"<section class=cards>{''.join(_cards(outcome))}</section>"
        f"<section class=charts>{charts}</section>"
        f"<section>{_latency_table(outcome)}</section>"
        f"<section class=details>{''.join(_details(outcome))}</section>"
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("toolkit.bench.report").joinpath(name).read_text()


def _cards(outcome: Outcome) -> Iterator[str]:
    result = outcome.result
    found = result.latencies
    failed = f"{result.num_failed:,} failed" if result.num_failed else "none failed"
    yield _card(f"{result.num_succeeded:,}", f"succeeded, {failed}")
    if result.saturated is not None:
        return
    yield _card(f"{result.per_second(result.output_tokens):,.0f}", "output tokens/s")
    yield _card(f"{result.per_second(result.num_succeeded):,.2f}", "requests/s")
    if result.good_share is not None and result.num_good is not None:
        caption = f"good requests/s ({result.good_share:.1%})"
        yield _card(f"{result.per_second(result.num_good):,.2f}", caption)
    for name, summary in (("TTFT", found.ttft), ("ITL", found.itl), ("E2E", found.e2el)):
        if summary is not None:
            (first, low), (last, high) = summary.percentiles[0], summary.percentiles[-1]
            yield _card(_ms(low.value), f"ms {name} p{first:g}; p{last:g}: {_ms(high.value)}")


def _card(value: str, caption: str) -> str:
    return f"<div><strong>{escape(value)}</strong><span>{escape(caption)}</span></div>"


def _charts(outcome: Outcome) -> Iterator[Chart]:
    records = [r for r in outcome.records if r.sent is not None]
    ends = [r.ended for r in records if r.ended is not None]
    if not ends or max(ends) <= 0:
        return
    yield from _timeline(outcome, records, max(ends))
    if outcome.result.saturated is not None:
        return
    done = [r for r in records if r.ok and r.first_token is not None]
    if not done:
        return
    yield _over_time(records, done, max(ends))
    yield _tails(
        "Time to first token (TTFT)",
        ("from schedule", "s0", [r.ttft for r in done]),
        ("from send", "s1", [r.service_ttft for r in done]),
    )
    yield _tails(
        "End to end (E2E)",
        ("from schedule", "s0", [r.e2el for r in done]),
        ("from send", "s1", [r.service_e2el for r in done]),
    )
    gaps = np.concatenate([r.token_gaps() for r in done])
    if len(gaps):
        tpot = [t for r in done if (t := r.tpot) is not None]
        yield _tails(
            "Between tokens", ("each (ITL)", "s0", gaps), ("mean of a request (TPOT)", "s1", tpot)
        )
        yield _gaps(gaps)


def _timeline(outcome: Outcome, records: list[RequestRecord], end: float) -> Iterator[Chart]:
    bins = int(np.clip(len(records) // 5, MIN_BINS, MAX_BINS))
    edges = np.linspace(0.0, end, bins + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    x = Axis.linear("seconds", 0.0, end)
    tokens = tokens_between(records, edges) / np.diff(edges)
    running = in_flight(records, edges)
    arrived = np.histogram([r.scheduled for r in records], edges)[0] / np.diff(edges)
    ends = [r.ended for r in records if r.ok and r.ended is not None]
    finished = np.histogram(ends, edges)[0] / np.diff(edges)
    throughput = Chart("Throughput", x, Axis.linear("output tokens/s", 0.0, float(tokens.max())))
    flight = Chart("Requests in flight", x, Axis.linear("requests", 0.0, float(running.max())))
    if outcome.result.steady is not None:
        window = outcome.result.steady.window
        for chart in (throughput, flight):
            chart.band("steady", window.start, window.end)
    if outcome.result.saturated is None:
        yield throughput.area("tokens/s", "s0", middles, tokens)
    yield flight.area("in flight", "s2", middles, running)
    highest = float(max(arrived.max(), finished.max()))
    rates = Chart("Arrivals and ends", x, Axis.linear("requests/s", 0.0, highest))
    yield rates.line("scheduled", "s1", middles, arrived).line("finished", "s0", middles, finished)


def _over_time(records: list[RequestRecord], done: list[RequestRecord], end: float) -> Chart:
    """Plot TTFT by arrival. Failed requests are at the upper edge."""
    shown = done[:: len(done) // MAX_DOTS + 1]
    times = [r.ttft * 1e3 for r in shown]
    chart = Chart(
        "Each request",
        Axis.linear("scheduled at, s", 0.0, end),
        Axis.logarithmic("TTFT, ms", min(times), max(times)),
    )
    chart.points("TTFT", "s0", [r.scheduled for r in shown], times)
    failed = [r.scheduled for r in records if r.error is not None][:MAX_DOTS]
    if failed:
        chart.points("failed", "bad", failed, [chart.y.high] * len(failed))
    return chart


def _tails(title: str, *series: tuple[str, str, Any]) -> Chart:
    """Plot milliseconds by percentile, on an axis with equal steps for 90, 99, 99.9 %."""
    drawn = []
    for name, style, values in series:
        percents = np.array([p for p in TAIL if len(values) * (1 - p / 100) >= 1 or p <= 50])
        if len(values):
            drawn.append((name, style, percents, np.percentile(values, percents) * 1e3))
    end = max(1 / (1 - percents[-1] / 100) for _, _, percents, _ in drawn)
    ticks = tuple(tick for tick in TAIL_TICKS if tick[0] <= end * 1.001)
    x = Axis("percentile", TAIL_TICKS[0][0], max(end, 2.0), ticks, is_log=True)
    low = min(float(values.min()) for *_, values in drawn)
    high = max(float(values.max()) for *_, values in drawn)
    chart = Chart(title, x, Axis.logarithmic("ms", low, high))
    for name, style, percents, values in drawn:
        chart.line(name, style, 1 / (1 - percents / 100), values)
    return chart


def _gaps(gaps: Floats) -> Chart:
    """Plot a histogram of the gaps between tokens. Gaps beyond the axis count at its ends."""
    low, high = np.percentile(gaps, (1, 99.9)) * 1e3
    x = Axis.logarithmic("ms between tokens", float(max(low, high / 1e3)), float(high))
    edges = np.geomspace(x.low, x.high, MAX_BINS // 2 + 1)
    share = np.histogram(np.clip(gaps * 1e3, x.low, x.high), edges)[0] / len(gaps) * 100
    chart = Chart("Gaps between tokens", x, Axis.linear("% of tokens", 0.0, float(share.max())))
    return chart.area("share", "s2", np.sqrt(edges[1:] * edges[:-1]), share)


def _latency_table(outcome: Outcome) -> str:
    found = outcome.result.latencies
    if outcome.result.saturated is not None or found.e2el is None:
        return ""
    rows = (
        ("TTFT", found.ttft),
        ("TTFT from send", found.service_ttft),
        ("TPOT", found.tpot),
        ("ITL", found.itl),
        ("chunk gap", found.chunk_gap),
        ("E2E", found.e2el),
        ("E2E from send", found.service_e2el),
    )
    heads = ["mean", *(f"p{p:g}" for p in outcome.config.percentiles), "max", "values"]
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(
        f"<tr><th>{name}</th>{_cells(summary)}</tr>" for name, summary in rows if summary
    )
    return (
        "<h2>Latencies in ms, with 95% confidence intervals</h2><table class=numbers>"
        f"<tr><th></th>{head}</tr>{body}</table>"
    )


def _cells(summary: Summary) -> str:
    estimates = (summary.mean, *(estimate for _, estimate in summary.percentiles))
    cells = "".join(f"<td>{_ms(e.value)}<small>{_interval(e)}</small></td>" for e in estimates)
    return f"{cells}<td>{_ms(summary.max)}</td><td>{summary.count:,}</td>"


def _interval(estimate: IntervalEstimate) -> str:
    if estimate.low is None and estimate.high is None:
        return ""
    low, high = ("?" if bound is None else _ms(bound) for bound in (estimate.low, estimate.high))
    return f"{low} – {high}"


def _details(outcome: Outcome) -> Iterator[str]:
    result = outcome.result
    run: dict[str, Any] = {"client": describe_client(outcome.config, result)}
    if result.offered_rate is not None and result.sent_rate is not None:
        run["rate"] = f"{result.offered_rate:,.3f} requests/s offered, {result.sent_rate:,.3f} sent"
    if (metrics := describe_server(outcome)) is not None:
        run["server metrics"] = metrics
    if outcome.server_version is not None:
        run["server version"] = outcome.server_version
    run |= dict(text.split("=", 1) for text in outcome.config.metadata)
    yield _detail("Run", run.items(), is_open=True)
    yield _detail(
        "Settings", ((k, v) for k, v in settings(outcome).items() if v not in (None, (), False))
    )
    yield _detail("Client machine", environment().items())


def _detail(title: str, rows: Iterable[tuple[str, Any]], *, is_open: bool = False) -> str:
    body = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(_format(v))}</td></tr>" for k, v in rows
    )
    open_attribute = " open" if is_open else ""
    return f"<details{open_attribute}><summary>{title}</summary><table>{body}</table></details>"


def _format(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _ms(seconds: float) -> str:
    """Format as milliseconds with three or more digits."""
    number = seconds * 1e3
    digits = 0 if number >= 1000 else 1 if number >= 100 else 2
    return f"{number:,.{digits}f}"
