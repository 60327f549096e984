"""The device that `tk serve` would run on and its memory, asked of the driver and the system."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil

from toolkit.errors import ConfigError
from toolkit.hardware import cgroup


@dataclass(frozen=True, slots=True)
class Device:
    """`kind`: cpu or cuda. Memory in bytes."""

    kind: str
    name: str
    total: int
    free: int


def find_device(wanted: str = "auto", count: int = 1) -> Device:
    """auto: the first GPU that this process may use, or of the first `count` the one with the least free memory; else the
    CPU. Raises ConfigError when there are fewer GPUs.
    """
    gpus = find_gpus() if wanted != "cpu" else []
    if gpus and count > len(gpus):
        raise ConfigError(
            f"{count} GPUs are asked for (--tensor-parallel-size and its like), and there are {len(gpus)} here.",
            param="tensor_parallel_size",
        )
    if gpus:
        return min(gpus[:count], key=lambda gpu: gpu.free)
    if wanted == "cuda":
        raise ConfigError(
            "--device cuda: NVIDIA's driver knows no GPU here; tk doctor says more.", param="device"
        )
    memory = psutil.virtual_memory()
    limit, left = cgroup.memory()
    return Device("cpu", "cpu", min(memory.total, limit), min(memory.available, left))


def find_gpus() -> list[Device]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return [_gpu(pynvml, handle) for handle in _visible(pynvml)]
    except pynvml.NVMLError:
        return []


def _visible(nvml: Any) -> list[Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return handles
    visible = []
    for word in (part.strip() for part in listed.split(",")):
        named = [
            handle
            for index, handle in enumerate(handles)
            if word and (word == str(index) or nvml.nvmlDeviceGetUUID(handle).startswith(word))
        ]
        if not named:
            break  # CUDA sees none of those behind one that does not exist
        visible += named[:1]
    return visible


def _gpu(nvml: Any, handle: Any) -> Device:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        usable = int(memory.total) - int(memory.reserved)  # what CUDA calls the total
    except nvml.NVMLError:  # an old driver
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        usable = int(memory.total)
    return Device("cuda", str(nvml.nvmlDeviceGetName(handle)), usable, int(memory.free))
