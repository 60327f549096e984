"""Numbers as the screen and the snapshot write them. What is not known is a dash."""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = "-"


def count(value: float | None) -> str:
    """`12,345`."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """In at most five columns: `7.5`, `812`, `12.3k`, `4.5M`."""
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
    """With one decimal where it means something: `0.4`, `41.5`, `4,150`."""
    if value is None:
        return NOTHING
    return f"{value:,.1f}" if value < 100 and value % 1 else f"{value:,.0f}"


def per_second(value: float | None, unit: str) -> str:
    """`41.5 tok/s`."""
    return f"{decimal(value)} {unit}/s"


def percent(value: float | None, digits: int = 1) -> str:
    """Of a share from 0 to 1. What is there, but little, is not 0%."""
    if value is None:
        return NOTHING
    return f"<{10.0**-digits:g}%" if 0 < value < 0.005 * 10.0**-digits else f"{value:.{digits}%}"


def seconds(value: float | None) -> str:
    """With three digits that mean something."""
    if value is None:
        return NOTHING
    if value >= 99.95:
        return f"{value:,.0f} s"
    if value >= 0.9995:
        return f"{value:.{2 if value < 9.995 else 1}f} s"
    milliseconds = value * 1e3
    return (
        f"{milliseconds:.{0 if milliseconds >= 99.95 else 1 if milliseconds >= 9.995 else 2}f} ms"
    )


def duration(value: float | None) -> str:
    """A long time in its two largest units: `41 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    if value is None:
        return NOTHING
    whole = max(0, int(value))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def span(value: float | None) -> str:
    """What latencies and means are taken over."""
    return "since the start" if value is None else f"last {duration(value)}"


def size(value: float | None) -> str:
    """Bytes: `310 MiB`, `72.4 GiB`."""
    if value is None:
        return NOTHING
    gib = value / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{value / 2**20:,.0f} MiB"


def reasons(finished: Mapping[str, float]) -> str:
    """The most frequent first."""
    ordered = sorted(finished.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {number:,.0f}" for name, number in ordered) or "none"
