"""Settings of `tk serve` that choose how it starts: dry, or in the background."""

from dataclasses import dataclass

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunConfig:
    """Settings of a dry run."""

    dry_run: bool = option(
        False,
        "Report whether the model fits. Includes the context length and the number of sequences. "
        "Nothing is loaded or downloaded.",
        subject="Before it starts",
        common=True,
    )
    json: bool = option(False, "With --dry-run: print the report as JSON.")

    def __post_init__(self) -> None:
        check_all(self)
        if self.json and not self.dry_run:
            raise ConfigError("--json needs --dry-run.", param="json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachConfig:
    """Settings of a server in the background."""

    detach: bool = option(
        False,
        "Run in the background. The command returns when the server is ready; tk logs prints its "
        "log, tk stop ends it.",
        subject="Before it starts",
        common=True,
    )

    def __post_init__(self) -> None:
        check_all(self)
