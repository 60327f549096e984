"""`tk bench compare A B`: changes between two results, and their statistical significance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from toolkit.bench.report.document import SCHEMA
from toolkit.bench.report.summary import NORMAL_95
from toolkit.bench.report.wording import TITLES
from toolkit.bench.run import to_json_text
from toolkit.config.load import CompareConfig
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

SIGNIFICANT = 2.576
"""Standard errors that chance exceeds once in a hundred times. 95 % is weak for a dozen rows."""
IGNORED_SETTINGS = {
    *("seed", "url", "clients", "num_warmups", "ready_check_timeout_sec"),
    *("goodput", "goodput_ratio", "percentile_metrics", "metric_percentiles"),
    *("json", "save_result", "result_dir", "result_filename", "metadata"),
}  # settings that may differ between two results of the same load

ResultDocument = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One number before and after. `error`: standard error of the difference, None if unknown."""

    name: str
    before: float
    after: float
    error: float | None
    higher_is_better: bool

    @property
    def percent(self) -> float:
        """Change in percent of `before`."""
        return 100 * (self.after / self.before - 1) if self.before else math.inf

    @property
    def is_significant(self) -> bool | None:
        """True if the change exceeds chance; None if unknown."""
        if self.error is None:
            return None
        return abs(self.after - self.before) > SIGNIFICANT * self.error

    @property
    def is_worse(self) -> bool:
        return self.after < self.before if self.higher_is_better else self.after > self.before

    def is_regression(self, threshold: float) -> bool:
        """Return True if it is worse by more than `threshold` percent, beyond chance."""
        return self.is_worse and bool(self.is_significant) and abs(self.percent) > threshold

    @property
    def verdict(self) -> str:
        if self.is_significant is None:
            return "unknown"
        if not self.is_significant:
            return "within noise"
        return "worse" if self.is_worse else "better"


def run_compare(config: CompareConfig) -> int:
    """Print the comparison. Returns the exit code of the command: 1 after a regression."""
    assert config.before is not None, "checked by the config"
    assert config.after is not None, "checked by the config"
    before, after = read_result(Path(config.before)), read_result(Path(config.after))
    found = list(changes(before, after))
    failures = describe_more_failures(before, after, config.threshold)
    regressions = [change.name for change in found if change.is_regression(config.threshold)]
    if failures is not None:
        regressions.append("failed requests")
    if config.json:
        print(to_json_text(_as_json(found, different_settings(before, after), regressions)), end="")
    else:
        from toolkit.console import SafeConsole

        _print(SafeConsole(), config, found, different_settings(before, after), failures)
    return 1 if regressions else 0


def read_result(path: Path) -> ResultDocument:
    """Read a result. Raises ConfigError for another format or if the client was saturated."""
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or "throughput" not in document:
        raise ConfigError(
            f"{path} is not the result of a single tk bench run ({SCHEMA}). Its schema is "
            f"{schema or 'missing'}."
        )
    if document["client"]["saturated"] is not None:
        raise ConfigError(
            f"{path} does not measure the server. CLIENT SATURATED: "
            f"{document['client']['saturated']}."
        )
    return dict(document)


def changes(before: ResultDocument, after: ResultDocument) -> Iterator[MetricChange]:
    """Yield throughput, and the mean and common percentiles of each latency."""
    yield from _throughput(before, after)
    for name, title in TITLES.items():
        old, new = before[f"{name}_s"], after[f"{name}_s"]
        if old is None or new is None:
            continue
        for key in old:
            if f"{key}_ci" in old and f"{key}_ci" in new:
                error = _error(old[f"{key}_ci"], new[f"{key}_ci"])
                yield MetricChange(
                    f"{title} {key}, ms",
                    old[key] * 1e3,
                    new[key] * 1e3,
                    _scaled(error),
                    higher_is_better=False,
                )


def _throughput(before: ResultDocument, after: ResultDocument) -> Iterator[MetricChange]:
    """Compare the steady windows if both runs have one: only those have a known error."""
    for key, title in (("output_tokens_per_s", "output tok/s"), ("requests_per_s", "requests/s")):
        if before["steady"] and after["steady"]:
            old, new = before["steady"], after["steady"]
            error = _error(old[f"{key}_ci"], new[f"{key}_ci"])
            yield MetricChange(f"{title}, steady", old[key], new[key], error, higher_is_better=True)
        else:
            old, new = before["throughput"], after["throughput"]
            yield MetricChange(title, old[key], new[key], None, higher_is_better=True)
    goodput = [document["goodput"] for document in (before, after)]
    if goodput[0]["objectives_s"] and goodput[0]["objectives_s"] == goodput[1]["objectives_s"]:
        old, new = (one["requests_per_s"] for one in goodput)
        yield MetricChange("good requests/s", old, new, None, higher_is_better=True)


def _error(*intervals: list[float | None]) -> float | None:
    """Return the standard error of a difference from the intervals of its two numbers."""
    total = 0.0
    for low, high in intervals:
        if low is None or high is None:
            return None
        total += ((high - low) / (2 * NORMAL_95)) ** 2
    return math.sqrt(total)


def _scaled(error: float | None) -> float | None:
    return None if error is None else error * 1e3


def describe_more_failures(
    before: ResultDocument, after: ResultDocument, threshold: float
) -> str | None:
    """Describe an increase of the failure rate by more than `threshold` points, beyond chance."""
    counts = [
        (document["requests"]["failed"], document["requests"]["sent"])
        for document in (before, after)
    ]
    (old, num_old), (new, num_new) = counts
    if not num_old or not num_new:
        return None
    pooled = (old + new) / (num_old + num_new)
    error = math.sqrt(pooled * (1 - pooled) * (1 / num_old + 1 / num_new))
    increase = new / num_new - old / num_old
    if increase <= SIGNIFICANT * error or increase * 100 <= threshold:
        return None
    return f"{new:,} of {num_new:,} requests failed; before, {old:,} of {num_old:,}."


def different_settings(before: ResultDocument, after: ResultDocument) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: name to (before, after)."""
    old, new = dict(before["settings"]), dict(after["settings"])
    old["model"], new["model"] = before["server"]["model"], after["server"]["model"]
    names = [name for name in old if name not in IGNORED_SETTINGS and old[name] != new.get(name)]
    return {name: (old[name], new.get(name)) for name in names}


def _as_json(
    found: list[MetricChange], settings: dict[str, tuple[Any, Any]], regressions: list[str]
) -> dict[str, Any]:
    return {
        "schema": f"{SCHEMA}-compare",
        "settings": {name: {"before": old, "after": new} for name, (old, new) in settings.items()},
        "changes": [
            {
                "name": change.name,
                "before": change.before,
                "after": change.after,
                "percent": change.percent,
                "verdict": change.verdict,
            }
            for change in found
        ],
        "regressions": regressions,
    }


def _print(
    console: Console,
    config: CompareConfig,
    found: list[MetricChange],
    settings: dict[str, tuple[Any, Any]],
    failures: str | None,
) -> None:
    from rich.table import Table
    from rich.text import Text

    if settings:
        differ = ", ".join(
            f"{name} {_format(old)} → {_format(new)}" for name, (old, new) in settings.items()
        )
        console.print(
            Text(f"The loads differ: {differ}.", style="yellow"), soft_wrap=not console.is_terminal
        )
        console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("", style="bold")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    table.add_column("")
    styles = {"worse": "red", "better": "green"}
    for change in found:
        regression = change.is_regression(config.threshold)
        table.add_row(
            change.name,
            f"{change.before:,.2f}",
            f"{change.after:,.2f}",
            f"{change.percent:+.1f}%",
            Text("REGRESSION" if regression else change.verdict, styles.get(change.verdict, "dim")),
        )
    console.print(table)
    if failures is not None:
        console.print(Text(f"REGRESSION: {failures}", style="bold red"))
    bad = sum(change.is_regression(config.threshold) for change in found) + (failures is not None)
    console.print()
    if bad:
        console.print(Text(f"{bad} worse by more than {config.threshold:g}%.", style="bold red"))
    else:
        console.print(f"Nothing is worse by more than {config.threshold:g}%, beyond chance.")
    unknown = sum(
        c.is_worse and c.is_significant is None and abs(c.percent) > config.threshold for c in found
    )
    if unknown:
        note = (
            f"{unknown} worse by more than {config.threshold:g}%, but possibly by chance. "
            "Use longer runs."
        )
        console.print(Text(note, style="yellow"), soft_wrap=not console.is_terminal)


def _format(setting: object) -> str:
    return "-" if setting is None else str(setting)
