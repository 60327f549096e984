"""Numbers as the screen and the snapshot show them. Unknown numbers are a dash."""

from collections.abc import Mapping, Sequence

from toolkit import units

NOTHING = "-"


def count(value: float | None) -> str:
    """Format with thousands separators: `12,345`."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Format in at most five columns: `7.5`, `812`, `12.3k`, `4.5M`."""
    if value is None:
        return NOTHING
    if value < 9.95:
        return f"{value:.1f}".removesuffix(".0")
    if value < 9999.5:
        return f"{value:.0f}"
    factor, unit = (
        (1e3, "k") if value < 999_500 else (1e6, "M") if value < 999_500_000 else (1e9, "G")
    )
    scaled = value / factor
    return f"{scaled:.{1 if scaled < 99.95 else 0}f}{unit}"


def decimal(value: float | None) -> str:
    """Format with one decimal below 100: `0.4`, `41.5`, `4,150`."""
    if value is None:
        return NOTHING
    return f"{value:,.1f}" if value < 100 and value % 1 else f"{value:,.0f}"


def per_second(value: float | None, unit: str) -> str:
    """Format a rate: `41.5 tok/s`."""
    return f"{decimal(value)} {unit}/s"


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share from 0 to 1. A small share is `<1%`, not `0%`."""
    if value is None:
        return NOTHING
    return f"<{10.0**-digits:g}%" if 0 < value < 0.005 * 10.0**-digits else f"{value:.{digits}%}"


def drafts(acceptance: float | None, by_position: Sequence[float]) -> str:
    """Format shares of right drafts: `62%: 80 61 45`. Empty if there are none."""
    if acceptance is None:
        return ""
    return f"{percent(acceptance, 0)}: {' '.join(f'{100 * share:.0f}' for share in by_position)}"


def seconds(value: float | None) -> str:
    """Format a time with three significant digits: `5.12 ms`, `51.2 ms`, `5.12 s`."""
    if value is None:
        return NOTHING
    if value >= 99.95:
        return f"{value:,.0f} s"
    if value >= 0.9995:
        return f"{value:.{2 if value < 9.995 else 1}f} s"
    milliseconds = value * 1e3
    digits = 0 if milliseconds >= 99.95 else 1 if milliseconds >= 9.995 else 2
    return f"{milliseconds:.{digits}f} ms"


def duration(value: float | None) -> str:
    """Format in the two largest units: `41 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    if value is None:
        return NOTHING
    total = max(0, int(value))
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {total % 60} s" if minutes else f"{total} s"


def span(value: float | None) -> str:
    """Format the time range of means and latencies; None is the server's lifetime."""
    return "since the start" if value is None else f"last {duration(value)}"


def size(value: float | None) -> str:
    """Format bytes: `310.0 MiB`, `72.40 GiB`."""
    return NOTHING if value is None else units.size(value)


def reasons(finished: Mapping[str, float]) -> str:
    """Format counts by reason, the most frequent first: `stop 12, length 2`."""
    ordered = sorted(finished.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {number:,.0f}" for name, number in ordered) or "none"
