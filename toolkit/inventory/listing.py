"""`tk models`: the models at hand, and which of them this machine has room for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config import EngineConfig
from toolkit.errors import ConfigError, ToolkitError
from toolkit.hardware.devices import Device, find_device
from toolkit.inventory.console import answer, talk, write
from toolkit.inventory.estimate import estimate
from toolkit.inventory.find import Found, at_hand
from toolkit.logs import harmless
from toolkit.units import count, size


@dataclass(frozen=True, slots=True)
class Row:
    """A model, and what the device makes of it: `fits` is yes, no, `up to N` tokens, or `not run`."""

    found: Found
    fits: str

    def as_json(self) -> dict[str, Any]:
        checkpoint = self.found.checkpoint
        return {
            "name": self.found.name,
            "path": str(self.found.path),
            "size": self.found.size,
            "architecture": checkpoint and checkpoint.architecture,
            "parameters": checkpoint and checkpoint.num_parameters,
            "dtype": checkpoint and checkpoint.stored_type,
            "context": checkpoint and checkpoint.context,
            "problem": self.found.problem,
            "fits": self.fits,
        }


def list_models(folders: list[Path], *, as_json: bool) -> None:
    """Prints what is at hand in `folders`, in the cache, and with tk. Raises ConfigError for a folder that is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}.")
    device = find_device()
    rows = [Row(found, verdict(found, device)) for found in at_hand(folders)]
    if as_json:
        answer([row.as_json() for row in rows])
        return
    _print_table(rows)
    for row in rows:
        if row.found.problem is not None:
            talk(f"{row.found.name}: {row.found.problem.rstrip('.')}.")
    total = sum(row.found.size for row in rows)
    talk(
        f"{len(rows)} model{'s' * (len(rows) != 1)}, {size(total)}. FITS: whether {device.name}, with {size(device.free)} free, "
        f"has room for weights and one request of the full context."
    )


def verdict(found: Found, device: Device) -> str:
    """Whether `tk serve MODEL` would run on the device."""
    if found.checkpoint is None or found.problem is not None:
        return "not run"
    try:
        made = estimate(found.checkpoint, EngineConfig(), device)
    except ToolkitError:
        return "unknown"
    if made.fits:
        return "yes"
    return f"up to {made.largest_context:,}" if made.largest_context else "no"


def _print_table(rows: list[Row]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", overflow="ellipsis", no_wrap=True, min_width=10)
    for title in ("KIND", "PARAMS", "DTYPE", "SIZE", "CONTEXT"):
        right = title in ("PARAMS", "SIZE", "CONTEXT")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    table.add_column("FITS", no_wrap=True, min_width=6)
    for row in rows:
        found, checkpoint = row.found, row.found.checkpoint
        color = (
            "green" if row.fits == "yes" else "yellow" if row.fits.startswith("up to") else "red"
        )
        known = () if checkpoint is None else (
            escape(harmless(checkpoint.kind)),
            count(checkpoint.num_parameters) if checkpoint.num_parameters else "-",
            escape(harmless(checkpoint.stored_type or "-")),
        )  # fmt: skip
        context = None if checkpoint is None else checkpoint.context
        table.add_row(
            escape(harmless(found.name)),
            *(known or ("-", "-", "-")),
            size(found.size),
            f"{context:,}" if context else "-",
            f"[{color}]{escape(row.fits)}[/]",
        )
    write(table)
