"""Colors: two Textual themes, and the style names of `paint` in each and without colors."""

from dataclasses import dataclass
from functools import lru_cache

from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.style import Style
from textual.theme import Theme

from toolkit.top.drawing.draw import HEAT, HUES


@dataclass(frozen=True, slots=True)
class Colors:
    """Colors of a theme."""

    ground: str
    raised: str
    text: str
    dim: str
    line: str
    blue: str
    violet: str
    cyan: str
    green: str
    amber: str
    red: str
    selected: str
    heat: tuple[str, ...]  # from cold to hot


DARK = Colors(
    ground="#12151c",
    raised="#1b202b",
    text="#d5dae5",
    dim="#7d879c",
    line="#38415a",
    blue="#7fb0ff",
    violet="#c09bff",
    cyan="#63d3d8",
    green="#8fd98a",
    amber="#f2c063",
    red="#ff7f8e",
    selected="#2c3a5c",
    heat=("#1a2340", "#3b2f7e", "#8b2f86", "#d8475f", "#f58f42", "#ffe58a"),
)
LIGHT = Colors(
    ground="#fcfcfa",
    raised="#eef0f4",
    text="#232833",
    dim="#687184",
    line="#c3cad6",
    blue="#1f5fc4",
    violet="#7a3fb8",
    cyan="#0f7480",
    green="#257a32",
    amber="#9a5b00",
    red="#c2233b",
    selected="#d3e1fb",
    heat=("#e9edf8", "#bcd0f2", "#7fa0e6", "#8a5fd0", "#b52f86", "#7a0f3c"),
)


def theme(name: str, colors: Colors, *, dark: bool) -> Theme:
    """Build the theme of Textual's own widgets."""
    return Theme(
        name=name,
        primary=colors.blue,
        secondary=colors.violet,
        accent=colors.cyan,
        success=colors.green,
        warning=colors.amber,
        error=colors.red,
        foreground=colors.text,
        background=colors.ground,
        surface=colors.raised,
        panel=colors.raised,
        dark=dark,
    )


THEMES = {
    "tk-dark": theme("tk-dark", DARK, dark=True),
    "tk-light": theme("tk-light", LIGHT, dark=False),
}


class Palette:
    """Rich styles by name. Names separated by spaces are combined."""

    def __init__(self, colors: Colors | None) -> None:
        self.has_colors = colors is not None
        self._styles = _without_colors() if colors is None else _named(colors)
        self._heat = [] if colors is None else _ramp([colors.ground, *colors.heat], HEAT + 1)
        self.style = lru_cache(maxsize=2048)(self._style)

    def _style(self, name: str) -> Style:
        """Return the style of a name. Raises KeyError for unknown names."""
        found = Style()
        for part in name.split():
            found += self._cell(part) if part.startswith("heat") else self._styles[part]
        return found

    def _cell(self, name: str) -> Style:
        """Return the style of `heat3/7`: '▀' as two cells of a heatmap, one above the other."""
        if not self._heat:
            return Style()
        upper, _, lower = name[4:].partition("/")
        return Style(color=self._heat[int(upper)], bgcolor=self._heat[int(lower)])


def _named(colors: Colors) -> dict[str, Style]:
    styles = {
        "dim": Style(color=colors.dim),
        "stale": Style(color=colors.line if colors is DARK else colors.dim),
        "bold": Style(bold=True),
        "title": Style(color=colors.blue, bold=True),
        "rule": Style(color=colors.line),
        "track": Style(color=colors.line),
        "value": Style(bold=True),
        "bar": Style(color=colors.green),
        "spark": Style(color=colors.cyan),
        "good": Style(color=colors.green),
        "warn": Style(color=colors.amber),
        "bad": Style(color=colors.red, bold=True),
        "flag": Style(color=colors.cyan, bold=True),
        "link": Style(color=colors.violet),
        "head": Style(color=colors.dim, bgcolor=colors.raised),
        "sorted": Style(color=colors.blue, bold=True),
        "select": Style(bgcolor=colors.selected, bold=True),
        "bar-line": Style(bgcolor=colors.raised),
        "tab": Style(color=colors.dim),
        "tab-on": Style(color=colors.ground, bgcolor=colors.blue, bold=True),
        "key": Style(color=colors.blue, bold=True),
    }
    hues = {
        "gen": colors.green,
        "prompt": colors.violet,
        "run": colors.blue,
        "wait": colors.amber,
        "kv": colors.cyan,
        "power": colors.red,
    }
    for hue, color in hues.items():
        shades = _ramp([_mix(colors.ground, color, 0.55), color], HUES)
        styles |= {f"{hue}{i}": Style(color=shade) for i, shade in enumerate(shades)}
        styles[hue] = Style(color=color)
    return styles


def _without_colors() -> dict[str, Style]:
    names = {name: Style() for name in _named(DARK)}
    bold, dim = Style(bold=True), Style(dim=True)
    return names | {
        **dict.fromkeys(("bold", "title", "value", "bad", "flag", "sorted", "key"), bold),
        **dict.fromkeys(("dim", "rule", "track", "stale", "tab"), dim),
        "select": Style(reverse=True),
        "tab-on": Style(reverse=True, bold=True),
        "head": Style(underline=True),
    }


def _ramp(stops: list[str], count: int) -> list[str]:
    """Interpolate `count` colors from the first stop to the last."""
    ramp = []
    for index in range(count):
        at = index * (len(stops) - 1) / max(1, count - 1)
        low = min(int(at), len(stops) - 2)
        ramp.append(_mix(stops[low], stops[low + 1], at - low))
    return ramp


def _mix(one: str, other: str, share: float) -> str:
    def parsed(text: str) -> ColorTriplet:
        return Color.parse(text).get_truecolor()

    return blend_rgb(parsed(one), parsed(other), share).hex
