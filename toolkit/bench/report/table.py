"""Result as a table for one screen of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.summary import IntervalEstimate, Summary
from toolkit.bench.report.wording import (
    TITLES,
    describe_client,
    describe_load,
    describe_prompts,
    describe_server,
    has_multi_token_chunks,
    problems,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_COLUMNS = 4  # percentiles that fit as columns. If there are more, percentiles are rows


def print_table(console: Console, outcome: Outcome) -> None:
    """Print the result. With a saturated client, throughput and latencies are left out."""
    from rich.text import Text

    for name, text in _facts(outcome):
        console.print(
            Text.assemble((f"{name:<13}", "bold"), text), soft_wrap=not console.is_terminal
        )
    if outcome.result.num_succeeded and outcome.result.saturated is None:
        console.print()
        console.print(_latencies(outcome))
    notes = list(problems(outcome))
    if notes:
        console.print()
    for style, note in notes:
        console.print(Text(note, style=style), soft_wrap=not console.is_terminal)


def _facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    config, result = outcome.config, outcome.result
    yield "server", f"{config.url}  {outcome.model}  {config.route}"
    yield "load", describe_load(config)
    yield "prompts", f"{describe_prompts(config)} (seed {config.seed})"
    yield (
        "requests",
        f"{result.num_succeeded:,} succeeded, {result.num_failed:,} failed"
        + (f", {result.num_unfinished:,} unfinished" if result.num_unfinished else "")
        + f" in {result.wall:,.2f} s, at most {result.max_in_flight:,} at once",
    )
    if result.offered_rate is not None and result.sent_rate is not None:
        yield "rate", f"{result.offered_rate:,.2f} requests/s offered, {result.sent_rate:,.2f} sent"
    if result.saturated is None:
        yield from _throughput(outcome)
    if (text := describe_server(outcome)) is not None:
        yield "metrics", text
    yield "client", describe_client(config, result)
    if (
        config.is_paced
        and config.max_concurrency is not None
        and (wait := result.place_wait) is not None
    ):
        yield (
            "",
            f"waited {wait.at(50) * 1e3:,.2f} ms (p50), {wait.at(99) * 1e3:,.2f} ms (p99) "
            "for --max-concurrency",
        )


def _throughput(outcome: Outcome) -> Iterator[tuple[str, str]]:
    result = outcome.result
    yield (
        "throughput",
        f"{result.per_second(result.num_succeeded):,.2f} requests/s   "
        f"{result.per_second(result.output_tokens):,.0f} output tok/s   "
        f"{result.per_second(result.prompt_tokens):,.0f} prompt tok/s",
    )
    if outcome.sound_per_second is not None:
        yield "sound", f"{outcome.sound_per_second:,.1f}× real time"
    if (steady := result.steady) is None:
        yield "steady", "no steady part: a short run, a burst, a ramp, or a load that kept changing"
    else:
        yield (
            "steady",
            f"{plus_minus(steady.requests_per_s, 2)} requests/s, "
            f"{plus_minus(steady.output_tokens_per_s, 0)} tok/s, "
            f"{steady.in_flight:,.1f} at once, {steady.window.start:.1f}-{steady.window.end:.1f} s",
        )
    if result.num_good is not None and result.good_share is not None:
        yield (
            "goodput",
            f"{result.per_second(result.num_good):,.2f} requests/s: {result.good_share:.1%} met "
            f"{' '.join(outcome.config.goodput)} ms",
        )


def plus_minus(estimate: IntervalEstimate, digits: int) -> str:
    """Format an estimate like 12.5 ±0.3."""
    if estimate.high is None:
        return f"{estimate.value:,.{digits}f}"
    return f"{estimate.value:,.{digits}f} ±{estimate.high - estimate.value:,.{digits}f}"


def _rows(outcome: Outcome) -> Iterator[tuple[str, Summary]]:
    """Yield (title, latency) of the requested metrics; "from send" only where it differs."""
    found = outcome.result.latencies
    by_name = {"ttft": found.ttft, "tpot": found.tpot, "itl": found.itl, "e2el": found.e2el}
    service = {"ttft": found.service_ttft, "e2el": found.service_e2el}
    for name in outcome.config.metrics:
        if (summary := by_name[name]) is not None:
            yield TITLES[name], summary
        sent = service.get(name)
        if summary is not None and sent is not None and _differ(summary, sent):
            yield "  from send", sent
        if name == "itl" and has_multi_token_chunks(outcome.result) and found.chunk_gap is not None:
            yield "  chunk gap", found.chunk_gap


def _differ(one: Summary, other: Summary) -> bool:
    """Return True if they differ by more than one percent."""
    pairs = (
        (one.mean.value, other.mean.value),
        *((e.value, other.at(p)) for p, e in one.percentiles),
    )
    return any(abs(a - b) > 0.01 * a for a, b in pairs)


def _latencies(outcome: Outcome) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    rows = [(title, _cells(summary)) for title, summary in _rows(outcome)]
    names = ["mean", *(f"p{percent:g}" for percent in outcome.config.percentiles), "max"]
    if len(outcome.config.percentiles) <= MAX_COLUMNS:
        table.add_column("latency, ms", style="bold", min_width=11)
        for name in names:
            table.add_column(name, justify="right", min_width=8)
        for title, cells in rows:
            table.add_row(title, *(value for value, _ in cells))
            if not title.startswith(" "):
                table.add_row(
                    Text("  95%", style="dim"), *(Text(around, style="dim") for _, around in cells)
                )
    else:
        table.add_column("ms", style="bold")
        for title, _ in rows:
            table.add_column(title.strip(), justify="right")
        for index, name in enumerate(names):
            table.add_row(name, *(cells[index][0] for _, cells in rows))
    return table


def _cells(summary: Summary) -> list[tuple[str, str]]:
    """Return (milliseconds, half width of the interval) of mean, percentiles and maximum."""
    estimates = [summary.mean, *(estimate for _, estimate in summary.percentiles)]
    return [(f"{e.value * 1e3:,.2f}", _half_width(e)) for e in estimates] + [
        (f"{summary.max * 1e3:,.2f}", "")
    ]


def _half_width(estimate: IntervalEstimate) -> str:
    """Format the distance to the farther end of the interval. "+?" and "-?" mark an open end."""
    if estimate.low is None and estimate.high is None:
        return ""
    if estimate.high is None:
        return "+?"
    if estimate.low is None:
        return "-?"
    return f"±{max(estimate.high - estimate.value, estimate.value - estimate.low) * 1e3:,.2f}"
