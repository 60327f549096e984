"""What happened between two readings of each of several servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.top.readings.arithmetic import increase, observed, together
from toolkit.top.readings.reading import Histogram, Reading


@dataclass(frozen=True, slots=True)
class Window:
    """Two readings of one server. `old` None: since its start."""

    old: Reading | None
    new: Reading

    @property
    def seconds(self) -> float:
        """Between the two; 0 when that is unknown."""
        if self.old is not None:
            return self.new.time - self.old.time
        return self.new.wall - self.new.start_time if self.new.start_time is not None else 0.0


class Windows:
    """Sums over servers; None where no server has the metric."""

    def __init__(self, windows: list[Window]) -> None:
        self.windows = windows
        self.seconds = max(window.seconds for window in windows)

    def sum(self, name: str) -> float | None:
        """The numbers of now, added."""
        return total_of(window.new.numbers.get(name) for window in self.windows)

    def mean(self, name: str) -> float | None:
        """The mean of the numbers of now."""
        values = [window.new.numbers[name] for window in self.windows if name in window.new.numbers]
        return sum(values) / len(values) if values else None

    def increase(self, name: str) -> float | None:
        """How much counters rose."""
        return total_of(increase(name, window.old, window.new) for window in self.windows)

    def rate(self, name: str) -> float | None:
        """Increase per second."""
        rates = (
            gained / window.seconds
            for window in self.windows
            if window.seconds > 0 and (gained := increase(name, window.old, window.new)) is not None
        )
        return total_of(rates)

    def observed(self, name: str) -> Histogram:
        """What histograms took in."""
        return together(observed(name, window.old, window.new) for window in self.windows)

    def parts(self, name: str) -> dict[str, float]:
        """The numbers of now by a label, added."""
        counts: Counter[str] = Counter()
        for window in self.windows:
            counts.update(window.new.parts.get(name, {}))
        return dict(counts)

    def cores(self) -> dict[str, float]:
        """Processor cores in use, by process; of several servers, the busiest of each kind."""
        name = "process_cpu_seconds_total"
        found: dict[str, float] = {}
        for window in self.windows:
            before = window.old.parts.get(name, {}) if window.old is not None else {}
            for process, used in window.new.parts.get(name, {}).items():
                if window.seconds > 0 and used >= before.get(process, 0.0):
                    cores = (used - before.get(process, 0.0)) / window.seconds
                    found[process] = max(found.get(process, 0.0), cores)
        return found


def total_of(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
