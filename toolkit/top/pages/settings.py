"""The page of settings: what each server runs with, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.config.engine import PARTS
from toolkit.config.fields import options
from toolkit.config.server import ServerConfig
from toolkit.top import wording
from toolkit.top.drawing.listing import Column, Listing
from toolkit.top.drawing.paint import Block, Line, wrap
from toolkit.top.pages.page import Page
from toolkit.top.readings.server import Server
from toolkit.top.state import State

DEFAULTS = {
    row.name: row.default for config in (*PARTS.values(), ServerConfig) for row in options(config)
}
HIDDEN = ("model_name", "engine")
NO_SETTINGS = "This server tells only what stands in its metrics. A tk server tells all to its operator (--admin-key)."


@dataclass(frozen=True, slots=True)
class Row:
    """A setting, and its value on each server; None where a server has none."""

    name: str
    section: str
    values: tuple[str | None, ...]
    is_changed: bool

    @property
    def differs(self) -> bool:
        """Whether the servers do not agree."""
        return len({value for value in self.values if value is not None}) > 1


class SettingsPage(Page):
    """Settings of the servers that are looked at. Those that are not at their default are marked."""

    title = "Config"
    keys = (("s", "Sort"), ("/", "Filter"))
    shows_age = False

    def __init__(self) -> None:
        self.listing: Listing[Row] = Listing(
            [],
            lambda row: row.section + row.name,
            lambda row: f"{row.name} {row.section}",
            sort=None,
        )

    def show(self, state: State) -> None:
        """See Page."""
        servers = state.looked_at
        self.listing.columns = _columns(servers)
        told = [_settings(server) for server in servers]
        names = dict.fromkeys(name for one in told for name in one)
        rows = []
        for section, name in names:
            values = tuple(one.get((section, name)) for one in told)
            default = DEFAULTS.get(name, ...)
            changed = (
                section not in ("device", "build")
                and default is not ...
                and any(
                    value not in (None, _shown(default)) and (section != "metrics" or server.is_tk)
                    for server, value in zip(servers, values, strict=True)
                )
            )
            rows.append(Row(name, section, values, changed))
        self.listing.show(rows)

    def draw(self, state: State, width: int, height: int) -> Block:
        """The table, and what the marks mean."""
        servers = state.looked_at
        said: Block = []
        if all(server.settings is None for server in servers):
            said = [[(line, "warn")] for line in wrap(NO_SETTINGS, width, 2)]
        legend: Line = []
        if any(row.is_changed for row in self.listing.rows):
            legend += [("● ", "flag"), ("not the default   ", "dim")]
        if len(servers) > 1:
            legend += [("≠ ", "warn"), ("not the same everywhere", "dim")]
        self.listing.above = len(said)
        made = [*said, *self.listing.draw(width, height - len(said) - bool(legend))]
        return [*made[: height - 1], legend] if legend else made


def _columns(servers: Sequence[Server]) -> list[Column[Row]]:
    def value(index: int) -> Column[Row]:
        return Column(
            servers[index].name,
            13,
            lambda row: row.values[index] or "",
            lambda row: row.values[index] or "",
            left=True,
            descending=False,
            most=400,
            style=lambda row: "flag" if row.is_changed else "",
        )

    return [
        Column("", 2, _mark, _mark, left=True, style=lambda row: "flag" if row.is_changed else "warn"),
        Column("setting", 22, lambda row: row.name, lambda row: row.name, left=True, descending=False, most=38),
        Column("of", 9, lambda row: row.section, lambda row: row.section, left=True, descending=False, spare=1,
               style=lambda _: "dim"),
        *(value(index) for index in range(len(servers))),
    ]  # fmt: skip


def _mark(row: Row) -> str:
    return ("●" if row.is_changed else " ") + ("≠" if row.differs else " ")


def _settings(server: Server) -> dict[tuple[str, str], str]:
    """(section, name) to value: what /server_info tells, else the labels of the metrics."""
    told = server.settings
    if told is None:
        labels = server.last.labels if server.last is not None else {}
        shown = (
            (name, value) for name, value in labels.items() if name not in HIDDEN and name[0] != "_"
        )
        return {("metrics", name): _shown(value) for name, value in shown}
    found = {("build", "version"): _shown(told["version"])} if "version" in told else {}
    engine = told.get("engine")
    parts = engine.items() if isinstance(engine, dict) else ()
    asked = {"engine" if part == "device" else part: values for part, values in parts}
    sections = {"device": told.get("device"), **asked, "server": told.get("server")}
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            found[section, name] = _shown(value)
    return found


def _shown(value: Any) -> str:
    """As a flag would have it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or wording.NOTHING
    return {"True": "on", "False": "off", "None": wording.NOTHING}.get(str(value), str(value))
