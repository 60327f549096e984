"""The device that `tk serve` would run on, and its memory, from the driver and the system."""

import os
from dataclasses import dataclass
from typing import Any

import psutil

from toolkit.errors import ConfigError
from toolkit.hardware import cgroup


@dataclass(frozen=True, slots=True)
class Device:
    """A device, with its memory in bytes."""

    kind: str  # "cpu" or "cuda"
    name: str
    total: int
    free: int


def find_device(wanted: str = "auto", count: int = 1) -> Device:
    """Find the fullest of the first `count` GPUs, else the CPU. `wanted`: auto, cuda or cpu.

    Raises ConfigError if there are fewer GPUs."""
    gpus = find_gpus() if wanted != "cpu" else []
    if gpus and count > len(gpus):
        raise ConfigError(
            f"The parallel sizes need {count} GPUs, and this machine has {len(gpus)}. Lower "
            f"--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size.",
            param="tensor_parallel_size",
        )
    if gpus:
        return min(gpus[:count], key=lambda gpu: gpu.free)
    if wanted == "cuda":
        raise ConfigError(
            "--device cuda: NVIDIA's driver finds no GPU here. Run tk doctor for the reason.",
            param="device",
        )
    memory = psutil.virtual_memory()
    limit, left = cgroup.memory()
    return Device("cpu", "cpu", min(memory.total, limit), min(memory.available, left))


def find_gpus() -> list[Device]:
    """Return the NVIDIA GPUs of CUDA_VISIBLE_DEVICES in its order. Empty without a driver."""
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
        matches = [
            handle
            for index, handle in enumerate(handles)
            if word and (word == str(index) or nvml.nvmlDeviceGetUUID(handle).startswith(word))
        ]
        if not matches:
            break  # CUDA ignores everything after the first entry that does not exist
        visible += matches[:1]
    return visible


def _gpu(nvml: Any, handle: Any) -> Device:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        usable = int(memory.total) - int(memory.reserved)  # CUDA's total
    except nvml.NVMLError:  # old driver
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        usable = int(memory.total)
    return Device("cuda", str(nvml.nvmlDeviceGetName(handle)), usable, int(memory.free))
