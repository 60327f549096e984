"""What the machine gives a server: processor and memory of its processes, and its GPUs. Read when somebody asks."""

from __future__ import annotations

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
        "Memory.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    "gpu_utilization_perc": (
        "Share of the time in which some kernel ran, 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "gpu_power_watts": ("Power drawn.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "gpu_power_limit_watts": (
        "Power that it may draw.",
        lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    ),
    "gpu_temperature_celsius": (
        "Temperature.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
}
"""Metrics of a GPU: what each means, and how NVML is asked."""


class ProcessMetrics(Collector):
    """Processor time and memory of this process and those that it has started, by what they do."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._server = psutil.Process()
        self._kinds: dict[int, str] = {}

    def collect(self) -> Iterable[Metric]:
        """What Prometheus reads."""
        seconds: dict[str, float] = {}
        memory: dict[str, float] = {}
        for process in (self._server, *self._server.children()):
            try:
                kind = self._kind(process)
                times = process.cpu_times()
                seconds[kind] = seconds.get(kind, 0.0) + times.user + times.system
                memory[kind] = memory.get(kind, 0.0) + process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        cpu = CounterMetricFamily(
            f"{self._prefix}:process_cpu_seconds",
            "Processor time, by what the process does.",
            labels=["process"],
        )
        resident = GaugeMetricFamily(
            f"{self._prefix}:process_resident_memory_bytes",
            "Memory, by what the process does.",
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
    """Memory, utilization, power and temperature of the machine's NVIDIA GPUs, through NVML; nothing where there is
    none.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._nvml, self._gpus = _find_gpus()

    def collect(self) -> Iterable[Metric]:
        """What Prometheus reads."""
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
                except self._nvml.NVMLError:  # not every device tells everything
                    continue
            families.append(family)
        return families


def _find_gpus() -> tuple[Any, list[tuple[Any, str]]]:
    """(NVML, a handle and a name for each GPU); (None, []) where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return pynvml, [(handle, pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return None, []
