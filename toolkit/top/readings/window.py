"""Changes between two readings of each of several servers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.top.readings.arithmetic import add_up, counter_increase, histogram_increase
from toolkit.top.readings.reading import Histogram, Reading


@dataclass(frozen=True, slots=True)
class Window:
    """Two readings of one server. If `old` is None, the window begins at the server's start."""

    old: Reading | None
    new: Reading

    @property
    def seconds(self) -> float:
        """Length of the window; 0 if the server's start is unknown."""
        if self.old is not None:
            return self.new.time - self.old.time
        return self.new.wall - self.new.start_time if self.new.start_time is not None else 0.0


class Windows:
    """Totals over servers; None if no server has the metric."""

    def __init__(self, windows: list[Window]) -> None:
        self.windows = windows
        self.seconds = max(window.seconds for window in windows)

    def sum(self, name: str) -> float | None:
        """Add up the newest values of a metric."""
        return sum_known(window.new.numbers.get(name) for window in self.windows)

    def mean(self, name: str) -> float | None:
        """Return the mean of the newest values of a metric."""
        values = [window.new.numbers[name] for window in self.windows if name in window.new.numbers]
        return sum(values) / len(values) if values else None

    def increase(self, name: str) -> float | None:
        """Return the increase of a counter."""
        return sum_known(counter_increase(name, window.old, window.new) for window in self.windows)

    def rate(self, name: str) -> float | None:
        """Return the increase of a counter per second."""
        rates = (
            gained / window.seconds
            for window in self.windows
            if window.seconds > 0
            and (gained := counter_increase(name, window.old, window.new)) is not None
        )
        return sum_known(rates)

    def histogram(self, name: str) -> Histogram:
        """Return the observations of a histogram."""
        return add_up(histogram_increase(name, window.old, window.new) for window in self.windows)

    def parts(self, name: str) -> dict[str, float]:
        """Add up the newest values of a metric by label."""
        counts: Counter[str] = Counter()
        for window in self.windows:
            counts.update(window.new.parts.get(name, {}))
        return dict(counts)

    def increase_of_parts(self, name: str) -> dict[str, float]:
        """Return the increase of a counter by label, where there is one."""
        gains: dict[str, float] = {}
        for window in self.windows:
            before = window.old.parts.get(name, {}) if window.old is not None else {}
            for part, value in window.new.parts.get(name, {}).items():
                gain = max(0.0, value - before.get(part, 0.0))
                gains[part] = gains.get(part, 0.0) + gain
        return {part: gain for part, gain in gains.items() if gain}

    def cores(self) -> dict[str, float]:
        """Return CPU cores in use by kind of process: the busiest server's of each kind."""
        name = "process_cpu_seconds_total"
        found: dict[str, float] = {}
        for window in self.windows:
            before = window.old.parts.get(name, {}) if window.old is not None else {}
            for process, used in window.new.parts.get(name, {}).items():
                if window.seconds > 0 and used >= before.get(process, 0.0):
                    cores = (used - before.get(process, 0.0)) / window.seconds
                    found[process] = max(found.get(process, 0.0), cores)
        return found


def sum_known(values: Iterable[float | None]) -> float | None:
    """Add up the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
