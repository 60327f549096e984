"""Simulated servers of `tk top --demo`."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.client.wire import ServerError
from toolkit.top.readings.reading import Reading
from toolkit.top.readings.simulation import BLOCK, Profile, Simulation
from toolkit.top.readings.source import NO_LIST

SERVERS = (
    Profile("atlas", "qwen3-8b", "0.1.0", arrivals=6.5),
    Profile(
        "borealis",
        "qwen3-8b",
        "0.1.0",
        num_blocks=1900,
        arrivals=2.6,
        period=50.0,
        prompt=900,
        answer=340,
    ),
    Profile(
        "vllm", "llama-3.1-8b", "0.32.0", is_tk=False, arrivals=2.0, swing=0.9, max_num_seqs=256
    ),
)
PAST = 120.0  # simulated seconds before the start
GPU_MEMORY = 141 * 2**30


class DemoSource:
    """One simulated server, in real time by `clock` (seconds)."""

    def __init__(
        self, profile: Profile, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = f"demo://{profile.name}"
        self.profile = profile
        self.clock = clock
        self.start = clock() - PAST
        self.start_time = time.time() - PAST
        self.simulation = Simulation(profile, seed)

    def past(self, interval: float) -> Iterator[Reading]:
        """Yield readings of the time before the start."""
        for index in range(int(PAST / interval)):
            yield self._reading(self.start + interval * index, requests=False)

    def now(self) -> float:
        return self.clock()

    async def read(self, *, requests: bool) -> Reading:
        return self._reading(self.clock(), requests=requests)

    async def abort(self, id: str) -> None:
        if not self.simulation.abort(id):
            raise ServerError(f"No live request has the id {id!r}.")

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _reading(self, now: float, *, requests: bool) -> Reading:
        simulation, profile = self.simulation, self.profile
        simulation.advance(now - self.start)
        reading = Reading(
            self.url,
            now,
            self.start_time + now - self.start,
            numbers=self._numbers(),
            parts={"request_success_total": dict(simulation.finished)},
            histograms={name: one.histogram() for name, one in simulation.histograms.items()},
            labels=self._labels(),
            model=profile.model,
            version=profile.version,
            settings=self._settings() if profile.is_tk else None,
        )
        if requests and profile.is_tk:
            reading.requests = simulation.live()
        elif requests:
            reading.no_requests = NO_LIST
        return reading

    def _numbers(self) -> dict[str, float]:
        simulation, profile = self.simulation, self.profile
        numbers = {
            "num_requests_running": float(len(simulation.running)),
            "num_requests_waiting": float(len(simulation.waiting)),
            "kv_cache_usage_perc": min(1.0, simulation.num_used_blocks / profile.num_blocks),
            "request_success_total": float(simulation.finished.total()),
            "process_start_time_seconds": self.start_time,
            "prompt_tokens_total": 0.0,
            "generation_tokens_total": 0.0,
            "num_preemptions_total": 0.0,
            **{name: float(count) for name, count in simulation.counters.items()},
        }
        if profile.is_tk:  # vLLM does not report its GPU
            busy = simulation.busy
            numbers |= {
                "gpu_memory_total_bytes": float(GPU_MEMORY),
                "gpu_memory_used_bytes": GPU_MEMORY * 0.93,
                "gpu_utilization_perc": busy,
                "gpu_power_watts": 120.0 + busy * (profile.power_limit - 150.0),
                "gpu_power_limit_watts": profile.power_limit,
                "gpu_temperature_celsius": 35.0 + 30.0 * busy,
            }
        return numbers

    def _labels(self) -> dict[str, str]:
        profile = self.profile
        cache = {"block_size": str(BLOCK), "num_gpu_blocks": str(profile.num_blocks)}
        cache["enable_prefix_caching"] = "True"
        return cache | ({"scheduling_policy": "fcfs"} if profile.is_tk else {})

    def _settings(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "version": profile.version,
            "model": profile.model,
            "engine": {
                "model": {
                    "model": profile.model,
                    "dtype": "auto",
                    "max_model_len": None,
                    "quantization": None,
                },
                "device": {"device": "auto", "attention_backend": "auto", "enforce_eager": False},
                "cache": {
                    "block_size": BLOCK,
                    "gpu_memory_utilization": 0.93,
                    "kv_cache_dtype": "auto",
                    "swap_space": None,
                    "enable_prefix_caching": True,
                },
                "scheduler": {
                    "max_num_seqs": profile.max_num_seqs,
                    "max_num_batched_tokens": profile.max_num_batched_tokens,
                    "scheduling_policy": "fcfs",
                },
            },
            "server": {"host": "0.0.0.0", "port": 8000, "api_key": ["***"], "api_workers": 1},
            "device": {
                "device": "cuda:0",
                "dtype": "bfloat16",
                "attention_backend": "triton",
                "max_model_len": 32768,
                "max_num_batched_tokens": profile.max_num_batched_tokens,
                "num_blocks": profile.num_blocks,
                "block_size": BLOCK,
            },
        }


def demo_sources(clock: Callable[[], float] = time.monotonic) -> list[DemoSource]:
    return [DemoSource(profile, seed, clock) for seed, profile in enumerate(SERVERS, start=1)]
