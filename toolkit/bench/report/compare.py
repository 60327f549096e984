"""`tk bench compare A B`: what changed between two results, and whether it is more than chance."""

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
from toolkit.bench.run import to_text
from toolkit.config.load import CompareConfig
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

SIGNIFICANT = 2.576
"""Standard errors: a difference as large is chance once in a hundred times. A comparison looks at a dozen of them."""
OF_NO_MATTER = {
    *("seed", "url", "clients", "num_warmups", "ready_check_timeout_sec"),
    *("goodput", "goodput_ratio", "percentile_metrics", "metric_percentiles"),
    *("json", "save_result", "result_dir", "result_filename", "metadata"),
}
"""Settings that may differ between two results of the same load."""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One number, before and after. `error`: the standard error of their difference; None when it is not known."""

    name: str
    before: float
    after: float
    error: float | None
    higher_is_better: bool

    @property
    def percent(self) -> float:
        """How much more there is, in per cent of what there was."""
        return 100 * (self.after / self.before - 1) if self.before else math.inf

    @property
    def significant(self) -> bool | None:
        """Whether it is more than chance; None when nobody knows."""
        if self.error is None:
            return None
        return abs(self.after - self.before) > SIGNIFICANT * self.error

    @property
    def worse(self) -> bool:
        return self.after < self.before if self.higher_is_better else self.after > self.before

    def regresses(self, threshold: float) -> bool:
        """Whether it got worse by more than `threshold` per cent, and not by chance."""
        return self.worse and bool(self.significant) and abs(self.percent) > threshold

    @property
    def verdict(self) -> str:
        if self.significant is None:
            return "cannot tell"
        if not self.significant:
            return "within noise"
        return "worse" if self.worse else "better"


def run_compare(config: CompareConfig) -> int:
    """Prints the comparison; the exit code of the command: 1 after a regression."""
    assert config.before is not None, "the config has checked it"
    assert config.after is not None, "the config has checked it"
    before, after = read_result(Path(config.before)), read_result(Path(config.after))
    found = list(changes(before, after))
    failures = more_failures(before, after, config.threshold)
    regressions = [change.name for change in found if change.regresses(config.threshold)]
    if failures is not None:
        regressions.append("failed requests")
    if config.json:
        print(to_text(_as_json(found, different_settings(before, after), regressions)), end="")
    else:
        from rich.console import Console

        _print(Console(highlight=False), config, found, different_settings(before, after), failures)
    return 1 if regressions else 0


def read_result(path: Path) -> Document:
    """Raises ConfigError when it is not a result of this version's kind, or of a client that was saturated."""
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or "throughput" not in document:
        raise ConfigError(
            f"{path} is no result of one run of tk bench ({SCHEMA}); it is {schema or 'something else'}."
        )
    if document["client"]["saturated"] is not None:
        raise ConfigError(
            f"{path} tells of the client, not of the server: CLIENT SATURATED: {document['client']['saturated']}."
        )
    return dict(document)


def changes(before: Document, after: Document) -> Iterator[Change]:
    """Throughput, and of each latency the mean and the percentiles that both have."""
    yield from _throughput(before, after)
    for name, title in TITLES.items():
        old, new = before[f"{name}_s"], after[f"{name}_s"]
        if old is None or new is None:
            continue
        for key in old:
            if f"{key}_ci" in old and f"{key}_ci" in new:
                error = _error(old[f"{key}_ci"], new[f"{key}_ci"])
                yield Change(
                    f"{title} {key}, ms",
                    old[key] * 1e3,
                    new[key] * 1e3,
                    _scaled(error),
                    higher_is_better=False,
                )


def _throughput(before: Document, after: Document) -> Iterator[Change]:
    """Of the steady parts, where both have one: the others have no known error."""
    for key, title in (("output_tokens_per_s", "output tok/s"), ("requests_per_s", "requests/s")):
        if before["steady"] and after["steady"]:
            old, new = before["steady"], after["steady"]
            error = _error(old[f"{key}_ci"], new[f"{key}_ci"])
            yield Change(f"{title}, steady", old[key], new[key], error, higher_is_better=True)
        else:
            old, new = before["throughput"], after["throughput"]
            yield Change(title, old[key], new[key], None, higher_is_better=True)
    good = [document["goodput"] for document in (before, after)]
    if good[0]["objectives_s"] and good[0]["objectives_s"] == good[1]["objectives_s"]:
        old, new = (one["requests_per_s"] for one in good)
        yield Change("good requests/s", old, new, None, higher_is_better=True)


def _error(*intervals: list[float | None]) -> float | None:
    """The standard error of a difference, of the intervals of its two numbers."""
    total = 0.0
    for low, high in intervals:
        if low is None or high is None:
            return None
        total += ((high - low) / (2 * NORMAL_95)) ** 2
    return math.sqrt(total)


def _scaled(error: float | None) -> float | None:
    return None if error is None else error * 1e3


def more_failures(before: Document, after: Document, threshold: float) -> str | None:
    """In words, when a share of requests larger by more than `threshold` per cent of all failed, and not by chance."""
    counts = [
        (document["requests"]["failed"], document["requests"]["sent"])
        for document in (before, after)
    ]
    (old, of_old), (new, of_new) = counts
    if not of_old or not of_new:
        return None
    pooled = (old + new) / (of_old + of_new)
    error = math.sqrt(pooled * (1 - pooled) * (1 / of_old + 1 / of_new))
    more = new / of_new - old / of_old
    if more <= SIGNIFICANT * error or more * 100 <= threshold:
        return None
    return f"{new:,} of {of_new:,} requests failed; before, {old:,} of {of_old:,}."


def different_settings(before: Document, after: Document) -> dict[str, tuple[Any, Any]]:
    """What was asked for differently: name, before, after."""
    old, new = dict(before["settings"]), dict(after["settings"])
    old["model"], new["model"] = before["server"]["model"], after["server"]["model"]
    names = [name for name in old if name not in OF_NO_MATTER and old[name] != new.get(name)]
    return {name: (old[name], new.get(name)) for name in names}


def _as_json(
    found: list[Change], settings: dict[str, tuple[Any, Any]], regressions: list[str]
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
    found: list[Change],
    settings: dict[str, tuple[Any, Any]],
    failures: str | None,
) -> None:
    from rich.table import Table
    from rich.text import Text

    if settings:
        differ = ", ".join(
            f"{name} {_shown(old)} → {_shown(new)}" for name, (old, new) in settings.items()
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
        regression = change.regresses(config.threshold)
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
    bad = sum(change.regresses(config.threshold) for change in found) + (failures is not None)
    console.print()
    if bad:
        console.print(Text(f"{bad} worse by more than {config.threshold:g}%.", style="bold red"))
    else:
        console.print(f"Nothing is worse by more than {config.threshold:g}%, beyond chance.")
    unknown = sum(
        c.worse and c.significant is None and abs(c.percent) > config.threshold for c in found
    )
    if unknown:
        note = f"{unknown} worse by more than {config.threshold:g}%, of which nobody can tell whether by chance: "
        console.print(
            Text(f"{note}longer runs would.", style="yellow"), soft_wrap=not console.is_terminal
        )


def _shown(setting: object) -> str:
    return "-" if setting is None else str(setting)
