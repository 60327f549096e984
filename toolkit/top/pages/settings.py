"""Config page: settings of the servers, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.config.engine import PARTS
from toolkit.config.fields import options
from toolkit.config.server import ServerConfig
from toolkit.top import wording
from toolkit.top.drawing.listing import Column, Listing, text_column
from toolkit.top.drawing.paint import Block, Line, wrap
from toolkit.top.pages.page import Page
from toolkit.top.readings.server import Server
from toolkit.top.state import State

DEFAULTS = {
    row.name: row.default for config in (*PARTS.values(), ServerConfig) for row in options(config)
}
HIDDEN = ("model_name", "engine")
NO_SETTINGS = (
    "This server reports only the settings in its metrics. "
    "A tk server reports all of them to its operator (--admin-key)."
)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting and its value on each server; None if the server does not report it."""

    name: str
    section: str
    values: tuple[str | None, ...]
    is_changed: bool

    @property
    def differs(self) -> bool:
        """True if the servers have different values."""
        return len({value for value in self.values if value is not None}) > 1


class SettingsPage(Page):
    """Settings of the shown servers. Values other than the default are marked."""

    title = "Config"
    keys = (("s", "Sort"), ("/", "Filter"))
    is_time_dependent = False

    def __init__(self) -> None:
        self.listing: Listing[SettingRow] = Listing(
            [],
            lambda row: row.section + row.name,
            lambda row: f"{row.name} {row.section}",
            sort=None,
        )

    def show(self, state: State) -> None:
        servers = state.shown_servers
        self.listing.columns = _columns(servers)
        settings = [_settings(server) for server in servers]
        names = dict.fromkeys(name for one in settings for name in one)
        rows = []
        for section, name in names:
            values = tuple(one.get((section, name)) for one in settings)
            default = DEFAULTS.get(name, ...)
            is_changed = (
                section not in ("device", "build")
                and default is not ...
                and any(
                    value not in (None, _shown(default)) and (section != "metrics" or server.is_tk)
                    for server, value in zip(servers, values, strict=True)
                )
            )
            rows.append(SettingRow(name, section, values, is_changed))
        self.listing.show(rows)

    def draw(self, state: State, width: int, height: int) -> Block:
        """Draw the table and the legend of the marks."""
        servers = state.shown_servers
        notes: Block = []
        if all(server.settings is None for server in servers):
            notes = [[(line, "warn")] for line in wrap(NO_SETTINGS, width, 2)]
        legend: Line = []
        if any(row.is_changed for row in self.listing.rows):
            legend += [("● ", "flag"), ("not the default   ", "dim")]
        if len(servers) > 1:
            legend += [("≠ ", "warn"), ("differs between servers", "dim")]
        self.listing.above = len(notes)
        lines = [*notes, *self.listing.draw(width, height - len(notes) - bool(legend))]
        return [*lines[: height - 1], legend] if legend else lines


def _columns(servers: Sequence[Server]) -> list[Column[SettingRow]]:
    def value(index: int) -> Column[SettingRow]:
        return text_column(
            servers[index].name,
            13,
            lambda row: row.values[index] or "",
            most=400,
            style=lambda row: "flag" if row.is_changed else "",
        )

    return [
        Column(
            "", 2, _mark, _mark, left=True, style=lambda row: "flag" if row.is_changed else "warn"
        ),
        text_column("setting", 22, lambda row: row.name, most=38),
        text_column("section", 9, lambda row: row.section, spare=1, style=lambda _: "dim"),
        *(value(index) for index in range(len(servers))),
    ]


def _mark(row: SettingRow) -> str:
    return ("●" if row.is_changed else " ") + ("≠" if row.differs else " ")


def _settings(server: Server) -> dict[tuple[str, str], str]:
    """Map (section, name) to a value from /server_info, else from labels of the metrics."""
    settings = server.settings
    if settings is None:
        labels = server.last.labels if server.last is not None else {}
        shown = (
            (name, value) for name, value in labels.items() if name not in HIDDEN and name[0] != "_"
        )
        return {("metrics", name): _shown(value) for name, value in shown}
    found = {("build", "version"): _shown(settings["version"])} if "version" in settings else {}
    engine = settings.get("engine")
    parts = engine.items() if isinstance(engine, dict) else ()
    # "device" is the section of resolved values; the settings named so get the name "engine".
    given = {"engine" if part == "device" else part: values for part, values in parts}
    sections = {"device": settings.get("device"), **given, "server": settings.get("server")}
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            found[section, name] = _shown(value)
    return found


def _shown(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or wording.NOTHING
    return {"True": "on", "False": "off", "None": wording.NOTHING}.get(str(value), str(value))
