"""Result files of a benchmark."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError

ENDINGS = (".json", ".jsonl", ".html")


def check_writable(path: Path, setting: str) -> None:
    """Raise ConfigError, with the setting's name, if the file cannot be written."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()  # a failed run must not leave an empty file
    except OSError as error:
        raise ConfigError(
            f"--{setting.replace('_', '-')} cannot write {path}: {error.strerror}.", param=setting
        ) from None


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """Paths of the files of one result."""

    json: Path  # the result
    jsonl: Path  # one line per request
    html: Path  # the report with plots

    @classmethod
    def create(cls, config: BenchConfig, model: str, began: datetime.datetime) -> ResultFiles:
        """Create the folder. Raises ConfigError if it is not writable."""
        folder = Path(config.result_dir or ".")
        setting = "result_dir" if config.result_dir else "result_filename"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--result-dir: cannot create {folder}: {error.strerror}.", param="result_dir"
            ) from None
        name = (config.result_filename or _default_name(config, model, began)).removesuffix(".json")
        files = cls(*(folder / f"{name}{ending}" for ending in ENDINGS))
        check_writable(files.json, setting)
        return files


def _default_name(config: BenchConfig, model: str, began: datetime.datetime) -> str:
    """Return a name such as tk-demo-50rps-20261121-184530."""
    model = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])
    if config.is_replayed:
        load = "trace"
    elif config.ramp_up_strategy is not None:
        load = f"{config.ramp_up_start_rps:g}to{config.ramp_up_end_rps:g}rps"
    elif config.is_paced:
        load = f"{config.request_rate:g}rps"
    else:
        load = f"{config.max_concurrency}conc" if config.max_concurrency else "burst"
    return f"{model}-{load}-{began:%Y%m%d-%H%M%S}"
