"""Start parameters of each core: its own GPUs or share of memory, passed in the environment."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.config import EngineConfig
from toolkit.config.engine import MEMORY_VARIABLE
from toolkit.errors import ConfigError
from toolkit.hardware.devices import find_device, find_gpus
from toolkit.logs import LogStyle
from toolkit.sequence import Adapter
from toolkit.worker import Report, WorkerInfo

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Launch:
    """Parameters to start a core, and to restart it."""

    config: EngineConfig
    folder: Path
    log: LogStyle
    index: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to this process's."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that the first core has read. A replacement reads those that are still served."""

    def for_replacement(self, info: WorkerInfo) -> Launch:
        """Return the launch of a replacement on the same kind of device, even if missing now.

        `info`: of the first core. Its adapters may be missing now, too, or have other ranks."""
        config = self.config.with_settings(
            device="cpu" if info.device == "cpu" else "cuda",
            lora_modules=(),
            enable_lora=self.config.lora.is_enabled,
            allow_runtime_lora=False,  # front ends do this
            max_lora_rank=info.max_lora_rank or None,
            lora_embeddings=info.lora_embeddings,
        )
        return replace(self, config=config, adapters=tuple(info.adapters))

    @property
    def name(self) -> str:
        """Name in messages."""
        return engine_name(self.index, self.config.parallel.data_parallel_size)


def engine_name(index: int, count: int) -> str:
    """Return an engine's name in messages."""
    return "the engine" if count == 1 else f"engine {index}"


def plan_launches(config: EngineConfig, folder: Path, log: LogStyle) -> list[Launch]:
    """Return a launch for each core. Raises ConfigError if there are too few GPUs."""
    is_parallel = config.parallel.data_parallel_size > 1
    environments = _environments(config) if is_parallel else [{}]
    return [
        Launch(config, folder, log, index, environment)
        for index, environment in enumerate(environments)
    ]


def _environments(config: EngineConfig) -> list[dict[str, str]]:
    """Return the environment of each core: its GPUs, or its share of the memory free now.

    Cores cannot see each other's memory use. With Ray, which chooses the devices, the environments
    are empty."""
    parallel = config.parallel
    count, each = parallel.data_parallel_size, parallel.world_size
    needs_gpus = config.device.device != "cpu" and parallel.distributed_executor_backend != "ray"
    gpus = _visible_gpus() if needs_gpus else []
    if needs_gpus and not gpus and config.device.device == "cuda":
        raise ConfigError(
            "--data-parallel-size assigns GPUs to each engine, but NVIDIA's driver (NVML) lists "
            "none here. Run tk doctor for details.",
            param="data_parallel_size",
        )
    if parallel.distributed_executor_backend == "ray":
        return [{} for _ in range(count)]
    # Also with GPUs, for which torch may have no driver.
    share = {MEMORY_VARIABLE: str(find_device("cpu").free // count)}
    if not gpus:
        return [share] * count
    if parallel.num_devices > len(gpus):
        fit = len(gpus) // each
        raise ConfigError(
            f"--data-parallel-size {count} with {each} GPU{'s' if each > 1 else ''} per engine "
            f"needs {parallel.num_devices} GPUs; this machine has {len(gpus)}. "
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


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process may use."""
    visible = os.environ.get(DEVICES)
    names = [name.strip() for name in visible.split(",")] if visible is not None else None
    if names is not None and names[0].startswith("MIG-"):
        return names
    number = len(find_gpus())
    return names[:number] if names is not None else [str(index) for index in range(number)]


class StartupPhases:
    """Merges the start-up phases of several cores. A phase ends once all cores completed it."""

    def __init__(self, count: int, report: Report) -> None:
        self._count, self._report = count, report
        self._done: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, seconds: float) -> None:
        """Record that a core has completed a phase."""
        self._done[name].append(seconds)
        if len(self._done[name]) == self._count:
            self._report(name, max(self._done[name]))


def smallest_core(infos: list[WorkerInfo]) -> WorkerInfo:
    """Return the info of the core with the smallest capacity, whose requests fit all cores."""
    return min(infos, key=lambda info: (info.max_model_len, info.cache_tokens))
