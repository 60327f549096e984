"""`tk models`: list local models, and whether they fit on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config import EngineConfig
from toolkit.errors import ConfigError, ToolkitError
from toolkit.hardware.devices import Device, find_device
from toolkit.inventory.console import print_json, print_note, print_rich
from toolkit.inventory.estimate import estimate
from toolkit.inventory.find import LocalModel, local_models
from toolkit.units import count, size


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model and whether it fits: yes, no, `up to N` tokens, `not run` or unknown.

    A LoRA adapter has `of BASE` instead."""

    model: LocalModel
    fits: str

    def as_json(self) -> dict[str, Any]:
        checkpoint = self.model.checkpoint
        return {
            "name": self.model.name,
            "path": str(self.model.path),
            "size": self.model.size,
            "architecture": checkpoint and checkpoint.architecture,
            "parameters": checkpoint and checkpoint.num_parameters,
            "dtype": checkpoint and checkpoint.stored_type,
            "context": checkpoint and checkpoint.context,
            "problem": self.model.problem,
            "adapter_of": self.model.base,
            "fits": self.fits,
        }


def list_models(folders: list[Path], *, as_json: bool) -> None:
    """Print the local models. Raises ConfigError for a missing folder."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}.")
    device = find_device()
    rows = [ModelRow(model, describe_fit(model, device)) for model in local_models(folders)]
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    _print_table(rows)
    for row in rows:
        if row.model.problem is not None:
            print_note(f"{row.model.name}: {row.model.problem.rstrip('.')}.")
    total = sum(row.model.size for row in rows)
    print_note(
        f"{len(rows)} model{'s' * (len(rows) != 1)}, {size(total)}. FITS: whether the weights and "
        f"one request of the full context fit on {device.name}, with {size(device.free)} free."
    )


def describe_fit(model: LocalModel, device: Device) -> str:
    """Return whether `tk serve MODEL` would run on the device, for the column FITS."""
    if model.base is not None:
        return f"of {model.base}"
    if model.checkpoint is None or model.problem is not None:
        return "not run"
    try:
        result = estimate(model.checkpoint, EngineConfig(), device)
    except ToolkitError:
        return "unknown"
    if result.fits:
        return "yes"
    return f"up to {result.largest_context:,}" if result.largest_context else "no"


def _print_table(rows: list[ModelRow]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", overflow="ellipsis", no_wrap=True, min_width=10)
    for title in ("KIND", "PARAMS", "DTYPE", "SIZE", "CONTEXT"):
        right = title in ("PARAMS", "SIZE", "CONTEXT")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    table.add_column("FITS", no_wrap=True, min_width=6)
    for row in rows:
        model, checkpoint = row.model, row.model.checkpoint
        color = (
            "green" if row.fits == "yes" else "yellow" if row.fits.startswith("up to") else "red"
        )
        if model.base is not None:
            color = ""
        known = ("adapter", "-", "-") if model.base is not None else () if checkpoint is None else (
            checkpoint.kind,
            count(checkpoint.num_parameters) if checkpoint.num_parameters else "-",
            checkpoint.stored_type or "-",
        )  # fmt: skip
        context = None if checkpoint is None else checkpoint.context
        table.add_row(
            model.name,
            *(known or ("-", "-", "-")),
            size(model.size),
            f"{context:,}" if context else "-",
            Text(row.fits, color),
        )
    print_rich(table)
