"""SVG plots without a library: lines, areas and points over linear or logarithmic axes.

Colours are CSS classes (s0, s1, … for series), so they follow the page's style and dark mode."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import ArrayLike

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 40  # margins for the labels of the axes


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high` in the units of the data. `ticks` are (value, label)."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    @classmethod
    def linear(cls, title: str, low: float, high: float) -> Axis:
        """Create an axis with about five ticks at round numbers."""
        high = high if high > low else low + 1.0
        step = _round_step((high - low) / 5)
        first = math.ceil(low / step - 1e-9)
        values = [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
        return cls(title, low, high, tuple((value, label(value)) for value in values))

    @classmethod
    def logarithmic(cls, title: str, low: float, high: float) -> Axis:
        """Create an axis whose ends are 1, 2 or 5 times a power of ten."""
        low = max(low, high * 1e-6, 1e-9)
        steps = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
        first = max((s for s in steps if s <= low), default=steps[0])
        last = min((s for s in steps if s >= high and s > first), default=steps[-1])
        ticks = [s for s in steps if first <= s <= last]
        if len(ticks) > 8:
            ticks = [s for s in ticks if f"{s:e}".startswith("1")]
        return cls(title, first, last, tuple((value, label(value)) for value in ticks), is_log=True)

    def place(self, values: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return positions from 0 to 1, clipped to the axis."""
        found = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.is_log:
            found = np.log(np.maximum(found, low))
            low, high = math.log(low), math.log(high)
        return np.clip((found - low) / (high - low), 0.0, 1.0)


@dataclass(slots=True)
class Chart:
    """A plot to draw series on."""

    title: str
    x: Axis
    y: Axis
    _shapes: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)
    _read: list[dict[str, object]] = field(default_factory=list)
    """Series whose values are shown at the pointer."""

    def line(self, name: str, style: str, xs: ArrayLike, ys: ArrayLike) -> Chart:
        """Draw a line through the points."""
        px, py = self._points(xs, ys)
        self._shapes.append(f'<polyline class="line {style}" points="{_joined(px, py)}"/>')
        self._name(name, style, px, ys)
        return self

    def area(self, name: str, style: str, xs: ArrayLike, ys: ArrayLike) -> Chart:
        """Draw a line through the points and fill the area below it."""
        px, py = self._points(xs, ys)
        if len(px):
            base = HEIGHT - BOTTOM
            outline = f"{px[0]:.1f},{base} {_joined(px, py)} {px[-1]:.1f},{base}"
            self._shapes.append(f'<polygon class="area {style}" points="{outline}"/>')
        return self.line(name, style, xs, ys)

    def points(self, name: str, style: str, xs: ArrayLike, ys: ArrayLike) -> Chart:
        px, py = self._points(xs, ys)
        dots = "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2"/>' for a, b in zip(px, py, strict=True)
        )
        self._shapes.append(f'<g class="dots {style}">{dots}</g>')
        self._legend.append((name, style))
        return self

    def band(self, name: str, start: float, end: float) -> Chart:
        """Shade a range of the x axis, behind everything else."""
        left, right = LEFT + self.x.place([start, end]) * (WIDTH - LEFT - RIGHT)
        self._shapes.insert(
            0,
            f'<rect class="band" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>',
        )
        self._legend.append((name, "band"))
        return self

    def svg(self) -> str:
        """Return the plot with its title and legend as HTML."""
        legend = "".join(
            f'<span><i class="{style}"></i>{escape(name)}</span>' for name, style in self._legend
        )
        data = escape(json.dumps(self._read), quote=True)
        return (
            f'<figure data-series="{data}">'
            f"<figcaption><b>{escape(self.title)}</b>{legend}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f"{self._grid()}{''.join(self._shapes)}"
            f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
            "<output></output></figure>"
        )

    def _points(self, xs: ArrayLike, ys: ArrayLike) -> tuple[Sequence[float], Sequence[float]]:
        px = LEFT + self.x.place(xs) * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - self.y.place(ys) * (HEIGHT - TOP - BOTTOM)
        return px.tolist(), py.tolist()

    def _name(self, name: str, style: str, px: Sequence[float], ys: ArrayLike) -> None:
        self._legend.append((name, style))
        self._read.append(
            {
                "name": name,
                "px": [round(p, 1) for p in px],
                "y": [label(y) for y in np.asarray(ys).tolist()],
            }
        )

    def _grid(self) -> str:
        parts = []
        base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value, text in self.y.ticks:
            y = base - float(self.y.place(value)) * (base - TOP)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value, text in self.x.ticks:
            x = LEFT + float(self.x.place(value)) * (right - LEFT)
            parts.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>'
            )
            parts.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{text}</text>')
        middle = (LEFT + right) / 2
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{base}" y2="{base}"/>')
        parts.append(
            f'<text class="title" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">'
            f"{escape(self.x.title)}</text>"
        )
        parts.append(
            f'<text class="title" transform="translate(13 {(TOP + base) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y.title)}</text>'
        )
        return "".join(parts)


def label(value: float) -> str:
    """Format a number with about three digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _joined(px: Sequence[float], py: Sequence[float]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(px, py, strict=True))


def _round_step(rough: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
