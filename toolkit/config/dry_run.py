"""What can be asked of `tk serve` before it serves."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunConfig:
    """Whether to load anything at all."""

    dry_run: bool = option(
        False,
        "Only say whether the model fits. With which context and how many sequences, too; nothing is loaded or fetched.",
        subject="Before it starts",
        common=True,
    )
    json: bool = option(False, "With --dry-run: print the answer as JSON.")

    def __post_init__(self) -> None:
        check_all(self)
        if self.json and not self.dry_run:
            raise ConfigError("--json is for the answer of --dry-run.", param="json")
