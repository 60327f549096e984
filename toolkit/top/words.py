"""Numbers as the screen and the snapshot write them. What is not known is a dash."""

from __future__ import annotations

import time
from collections.abc import Mapping

from toolkit.top.history import View
from toolkit.top.source import Identity

NOTHING = "-"


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def per_second(value: float | None, unit: str) -> str:
    if value is None:
        return f"{NOTHING} {unit}/s"
    return f"{value:,.1f} {unit}/s" if value < 100 and value % 1 else f"{value:,.0f} {unit}/s"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """With three digits that mean something."""
    if value is None:
        return NOTHING
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    milliseconds = value * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"


def reasons(finished: Mapping[str, float]) -> str:
    """The most frequent first."""
    ordered = sorted(finished.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {number:,.0f}" for name, number in ordered) or "none"


def span(value: float | None) -> str:
    return "since the start" if value is None else f"last {value:.0f} s"


def uptime(start_time: float | None) -> str | None:
    """`up 3 h 12 min`, from seconds since 1970; None when that is unknown."""
    if start_time is None:
        return None
    whole = max(0, int(time.time() - start_time))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"up {days} d {hours} h"
    if hours:
        return f"up {hours} h {minutes} min"
    return f"up {minutes} min {whole % 60} s" if minutes else f"up {whole} s"


def heading(url: str, identity: Identity, view: View) -> str:
    """Who is watched: model, version, address, uptime."""
    version = f"version {identity.version}" if identity.version else None
    parts = (identity.model or view.model or "unknown model", version, url, uptime(view.start_time))
    return "  ".join(part for part in parts if part)
