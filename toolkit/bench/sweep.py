"""`tk bench sweep`: one run for each value of a flag, or for each combination of several."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit.bench.report.document import SCHEMA, as_json
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.summary import Summary
from toolkit.bench.run import measure, run_loop, run_seed, save_numbered, to_json_text
from toolkit.config.fields import Option, build, options
from toolkit.config.load import BenchConfig, SweepConfig
from toolkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT = "max-concurrency=1,2,4,8,16,32,64"

Point = dict[str, Any]  # settings of one run that vary between runs


def sweep_points(config: SweepConfig) -> list[Point]:
    """Return all combinations of values. Raises ConfigError for an unknown flag or value."""
    if config.find_max_rps:
        raise ConfigError("A sweep does not search; remove --find-max-rps.", param="find_max_rps")
    rows: dict[str, Option] = {}
    for row in options(BenchConfig):
        rows |= {flag.removeprefix("--"): row for flag in (row.flag, *row.aliases)}
    varied: dict[str, list[Any]] = {}
    for text in config.vary or (DEFAULT,):
        flag, _, values = text.partition("=")
        flag = flag.lstrip("-").replace("_", "-")
        if flag not in rows or not values:
            raise ConfigError(
                f"--vary takes a flag and values, such as {DEFAULT}; got {text!r}."
                f"{did_you_mean(flag, rows)}",
                param="vary",
            )
        row = rows[flag]
        varied[row.name] = [row.parse(value, f"--vary {flag}") for value in values.split(",")]
    return [
        dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())
    ]


def config_at(config: SweepConfig, point: Point, number: int = 0) -> BenchConfig:
    """Return the config of run `number`, from 0. Raises ConfigError if its settings conflict."""
    shared = {row.name: getattr(config, row.name) for row in options(BenchConfig)}
    shared["seed"] = run_seed(config.seed, number)
    return build(BenchConfig, shared | point)


def run_sweep(config: SweepConfig) -> int:
    """Measure and report, also if a later run fails. Returns the highest exit code of the runs."""
    points = sweep_points(config)
    # Check all configs before the first run.
    configs = [config_at(config, point, number) for number, point in enumerate(points)]
    outcomes: list[Outcome] = []
    try:
        for number, (point, one) in enumerate(zip(points, configs, strict=True), 1):
            settings = ", ".join(f"{name}={_short(value)}" for name, value in point.items())
            print(f"{number}/{len(points)}: {settings}", file=sys.stderr)
            outcome = run_loop(functools.partial(measure, one))
            outcomes.append(outcome)
            save_numbered(outcome, number)
            if outcome.interrupted:
                break
    finally:
        if outcomes:
            _report(config, points, outcomes)
    return max(outcome.exit_code for outcome in outcomes)


def _report(config: SweepConfig, points: list[Point], outcomes: list[Outcome]) -> None:
    if config.json:
        runs = [as_json(outcome) for outcome in outcomes]
        document = {"schema": f"{SCHEMA}-sweep", "varied": points[: len(runs)], "runs": runs}
        print(to_json_text(document), end="")
    else:
        from rich.text import Text

        from toolkit.console import SafeConsole

        console = SafeConsole()
        console.print(_table(points, outcomes))
        for outcome in outcomes:
            if outcome.result.saturated is not None:
                console.print(f"CLIENT SATURATED: {outcome.result.saturated}.", style="bold red")
        errors = {
            group.cause: group.example for outcome in outcomes for group in outcome.result.errors
        }
        for cause, example in errors.items():
            console.print(
                Text(f"{cause}: {example}", style="red"), soft_wrap=not console.is_terminal
            )


def _table(points: list[Point], outcomes: list[Outcome]) -> Table:
    """Return a table of throughput and latencies in milliseconds, one row per run."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in points[0]:  # split long names over several lines to leave room for the numbers
        table.add_column(name.replace("_", "\n"), justify="right", style="bold")
    percentiles = outcomes[0].config.percentiles
    first, last = f"p{percentiles[0]:g}", f"p{percentiles[-1]:g}"
    good = ["good"] * any(outcome.config.goodput for outcome in outcomes)
    for name in (
        "req/s",
        "out tok/s",
        f"TTFT {first}",
        last,
        f"ITL {first}",
        last,
        "failed",
        *good,
    ):
        table.add_column(name, justify="right")
    for point, outcome in zip(points, outcomes, strict=False):
        table.add_row(*(_short(value) for value in point.values()), *_cells(outcome))
    return table


def _cells(outcome: Outcome) -> Iterator[str]:
    result = outcome.result
    if result.saturated is not None:
        yield from "-" * 6
    else:
        yield f"{result.per_second(result.num_succeeded):,.2f}"
        yield f"{result.per_second(result.output_tokens):,.0f}"
        yield from _first_and_last(result.latencies.ttft)
        yield from _first_and_last(result.latencies.itl)
    yield f"{result.num_failed:,}" if result.num_failed else ""
    if result.good_share is not None and result.saturated is None:
        yield f"{result.good_share:.1%}"


def _first_and_last(summary: Summary | None) -> tuple[str, str]:
    """Return the lowest and the highest percentile in milliseconds."""
    if summary is None:
        return "-", "-"
    return (
        f"{summary.percentiles[0][1].value * 1e3:,.2f}",
        f"{summary.percentiles[-1][1].value * 1e3:,.2f}",
    )


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
