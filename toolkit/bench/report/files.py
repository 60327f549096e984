"""Files that a benchmark writes."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError

ENDINGS = (".json", ".jsonl", ".html")


def check_writable(path: Path, setting: str) -> None:
    """Raises ConfigError, which names the setting, when nothing can be written there."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()  # a run that comes to nothing leaves nothing
    except OSError as error:
        raise ConfigError(
            f"--{setting.replace('_', '-')} cannot write {path}: {error.strerror}.", param=setting
        ) from None


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Where a result goes."""

    json: Path
    """The result."""
    jsonl: Path
    """Each request."""
    html: Path
    """The report with plots."""

    @classmethod
    def of(cls, config: BenchConfig, model: str, began: datetime.datetime) -> ResultFiles:
        """Makes the folder. Raises ConfigError when nothing can be written there."""
        folder = Path(config.result_dir or ".")
        setting = "result_dir" if config.result_dir else "result_filename"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--result-dir cannot be made: {folder}: {error.strerror}.", param="result_dir"
            ) from None
        name = (config.result_filename or _name(config, model, began)).removesuffix(".json")
        files = cls(*(folder / f"{name}{ending}" for ending in ENDINGS))
        check_writable(files.json, setting)
        return files


def _name(config: BenchConfig, model: str, began: datetime.datetime) -> str:
    """Such as tk-demo-50rps-20261121-184530."""
    model = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])
    if config.replayed:
        load = "trace"
    elif config.ramp_up_strategy is not None:
        load = f"{config.ramp_up_start_rps:g}to{config.ramp_up_end_rps:g}rps"
    elif config.paced:
        load = f"{config.request_rate:g}rps"
    else:
        load = f"{config.max_concurrency}conc" if config.max_concurrency else "burst"
    return f"{model}-{load}-{began:%Y%m%d-%H%M%S}"
