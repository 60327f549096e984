"""What each of an engine's cores is started with: its own GPUs, or share of memory, told through its environment."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.config import EngineConfig
from toolkit.config.engine import MEMORY
from toolkit.errors import ConfigError
from toolkit.hardware.devices import find_device, find_gpus
from toolkit.logs import LogStyle
from toolkit.worker import Report, WorkerInfo

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Launch:
    """How one core is started, and started again."""

    config: EngineConfig
    folder: Path
    log: LogStyle
    index: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it has beside this process' variables."""

    def like(self, info: WorkerInfo) -> Launch:
        """That of a core in the place of one that found this out: on no other kind of device, though its own be missing now."""
        device = "cpu" if info.device == "cpu" else "cuda"
        return replace(self, config=self.config.with_settings(device=device))

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return name_of(self.index, self.config.parallel.data_parallel_size)


def name_of(index: int, count: int) -> str:
    """How one of so many engines is called."""
    return "the engine" if count == 1 else f"engine {index}"


def plan(config: EngineConfig, folder: Path, log: LogStyle) -> list[Launch]:
    """One for each of `--data-parallel-size`. Raises ConfigError, with the sizes that can be, when there are fewer GPUs."""
    several = config.parallel.data_parallel_size > 1
    environments = _environments(config) if several else [{}]
    return [
        Launch(config, folder, log, index, environment)
        for index, environment in enumerate(environments)
    ]


def _environments(config: EngineConfig) -> list[dict[str, str]]:
    """What each of several engines is told of its devices: its GPUs, or its share of the memory that is free now, as they do not see
    each other's. Nothing where Ray chooses.
    """
    parallel = config.parallel
    count, each = parallel.data_parallel_size, parallel.world_size
    ours = config.device.device != "cpu" and parallel.distributed_executor_backend != "ray"
    gpus = _gpus() if ours else []
    if ours and not gpus and config.device.device == "cuda":
        raise ConfigError(
            "--data-parallel-size gives each engine GPUs of its own, and NVIDIA's driver (NVML) lists none here; tk doctor says more.",
            param="data_parallel_size",
        )
    if parallel.distributed_executor_backend == "ray":
        return [{} for _ in range(count)]
    share = {
        MEMORY: str(find_device("cpu").free // count)
    }  # also beside GPUs, which torch may have no driver for
    if not gpus:
        return [share] * count
    if parallel.num_devices > len(gpus):
        fit = len(gpus) // each
        raise ConfigError(
            f"--data-parallel-size {count} with {each} GPU{'s' if each > 1 else ''} for each engine needs "
            f"{parallel.num_devices}, and there are {len(gpus)} here. "
            + (
                f"At most --data-parallel-size {fit} fits"
                if fit
                else "Not even one such engine fits"
            )
            + "; --device cpu needs none.",
            param="data_parallel_size",
        )
    return [
        share | {DEVICES: ",".join(gpus[index * each : (index + 1) * each])}
        for index in range(count)
    ]


def _gpus() -> list[str]:
    """The names of those that this process may use."""
    visible = os.environ.get(DEVICES)
    names = [name.strip() for name in visible.split(",")] if visible is not None else None
    if names is not None and names[0].startswith("MIG-"):
        return names
    number = len(find_gpus())
    return names[:number] if names is not None else [str(index) for index in range(number)]


class Phases:
    """Start-up of several cores at the same time, told as that of one: a phase is done when it is in all of them."""

    def __init__(self, count: int, report: Report) -> None:
        self._count, self._report = count, report
        self._done: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, seconds: float) -> None:
        """A core has come through a phase."""
        self._done[name].append(seconds)
        if len(self._done[name]) == self._count:
            self._report(name, max(self._done[name]))


def least(infos: list[WorkerInfo]) -> WorkerInfo:
    """Of the core that takes least: what it can run, all can."""
    return min(infos, key=lambda info: (info.max_model_len, info.num_blocks * info.block_size))
