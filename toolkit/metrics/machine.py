"""CPU time and memory of the server's processes, and state of its GPUs, read on each scrape."""

from collections.abc import Callable, Iterable
from typing import Any

import psutil
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_MODULES = {"toolkit.engine.cores.core_process": "engine", "toolkit.serving.api_worker": "worker"}

GPU_LABELS = ("gpu", "gpu_name")
GPU_READINGS: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "gpu_memory_used_bytes": (
        "Memory in use.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    "gpu_memory_total_bytes": (
        "Total memory.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    "gpu_utilization_perc": (
        "Share of time in which a kernel ran, from 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "gpu_power_watts": ("Power drawn.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "gpu_power_limit_watts": (
        "Power limit.",
        lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    ),
    "gpu_temperature_celsius": (
        "Temperature.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
}  # metrics of a GPU: help text, and a function of (NVML, device handle)


class ProcessMetrics(Collector):
    """CPU time and memory of this process and its children, by role."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._server = psutil.Process()
        self._kinds: dict[int, str] = {}

    def collect(self) -> Iterable[Metric]:
        seconds: dict[str, float] = {}
        memory: dict[str, float] = {}
        for process in (self._server, *self._server.children()):
            try:
                kind = self._kind(process)
                times = process.cpu_times()
                seconds[kind] = seconds.get(kind, 0.0) + times.user + times.system
                memory[kind] = memory.get(kind, 0.0) + process.memory_info().rss
            except psutil.Error:  # it ended meanwhile
                continue
        cpu = CounterMetricFamily(
            f"{self._prefix}:process_cpu_seconds",
            "CPU time, by role of the process.",
            labels=["process"],
        )
        resident = GaugeMetricFamily(
            f"{self._prefix}:process_resident_memory_bytes",
            "Resident memory, by role of the process.",
            labels=["process"],
        )
        for kind in seconds:
            cpu.add_metric([kind], seconds[kind])
            resident.add_metric([kind], memory[kind])
        return [cpu, resident]

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self._server.pid:
            return "server"
        if process.pid not in self._kinds:
            command = process.cmdline()
            self._kinds[process.pid] = next(
                (k for m, k in _MODULES.items() if m in command), "other"
            )
        return self._kinds[process.pid]


class GPUMetrics(Collector):
    """Memory, utilization, power and temperature of NVIDIA GPUs, from NVML. No GPU: no metrics."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._nvml, self._gpus = _find_gpus()

    def collect(self) -> Iterable[Metric]:
        if self._nvml is None:
            return []
        families = []
        for name, (text, read) in GPU_READINGS.items():
            family = GaugeMetricFamily(
                f"{self._prefix}:{name}", f"{text} By GPU.", labels=list(GPU_LABELS)
            )
            for index, (handle, gpu_name) in enumerate(self._gpus):
                try:
                    family.add_metric([str(index), gpu_name], read(self._nvml, handle))
                except self._nvml.NVMLError:  # not supported by this device
                    continue
            families.append(family)
        return families


def _find_gpus() -> tuple[Any, list[tuple[Any, str]]]:
    """Return (NVML, [(handle, name) of each GPU]), or (None, []) without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return pynvml, [(handle, pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return None, []
