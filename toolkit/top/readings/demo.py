"""Made-up servers to look at without a network: `tk top --demo`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.client.wire import ServerError
from toolkit.top.readings.reading import Reading
from toolkit.top.readings.simulation import BLOCK, Simulation, Traits
from toolkit.top.readings.source import OTHER_SERVER

SERVERS = (
    Traits("atlas", "qwen3-8b", "0.1.0", arrivals=6.5),
    Traits(
        "borealis",
        "qwen3-8b",
        "0.1.0",
        num_blocks=1900,
        arrivals=2.6,
        period=50.0,
        prompt=900,
        answer=340,
    ),
    Traits(
        "vllm", "llama-3.1-8b", "0.32.0", is_tk=False, arrivals=2.0, swing=0.9, max_num_seqs=256
    ),
)
PAST = 120.0  # seconds that have gone by before the first look
GPU_MEMORY = 141 * 2**30


class DemoSource:
    """One made-up server, in step with `clock` (seconds)."""

    def __init__(
        self, traits: Traits, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = f"demo://{traits.name}"
        self.traits = traits
        self.clock = clock
        self.start = clock() - PAST
        self.born = time.time() - PAST
        self.simulation = Simulation(traits, seed)

    def past(self, interval: float) -> Iterator[Reading]:
        """What would have been read before now."""
        for index in range(int(PAST / interval)):
            yield self._reading(self.start + interval * index, requests=False)

    def now(self) -> float:
        """See Source."""
        return self.clock()

    async def read(self, *, requests: bool) -> Reading:
        """See Source."""
        return self._reading(self.clock(), requests=requests)

    async def abort(self, id: str) -> None:
        """See Source."""
        if not self.simulation.abort(id):
            raise ServerError(f"There is no live request {id!r}.")

    async def close(self) -> None:
        """See Source."""

    def _reading(self, now: float, *, requests: bool) -> Reading:
        simulation, traits = self.simulation, self.traits
        simulation.advance(now - self.start)
        reading = Reading(
            self.url,
            now,
            self.born + now - self.start,
            numbers=self._numbers(),
            parts={"request_success_total": dict(simulation.finished)},
            histograms={name: one.histogram() for name, one in simulation.observed.items()},
            labels=self._labels(),
            model=traits.model,
            version=traits.version,
            settings=self._settings() if traits.is_tk else None,
        )
        if requests and traits.is_tk:
            reading.requests = simulation.live()
        elif requests:
            reading.no_requests = OTHER_SERVER
        return reading

    def _numbers(self) -> dict[str, float]:
        simulation, traits = self.simulation, self.traits
        numbers = {
            "num_requests_running": float(len(simulation.running)),
            "num_requests_waiting": float(len(simulation.waiting)),
            "kv_cache_usage_perc": min(1.0, simulation.num_used_blocks / traits.num_blocks),
            "request_success_total": float(simulation.finished.total()),
            "process_start_time_seconds": self.born,
            "prompt_tokens_total": 0.0,
            "generation_tokens_total": 0.0,
            "num_preemptions_total": 0.0,
            **{name: float(count) for name, count in simulation.counters.items()},
        }
        if traits.is_tk:  # vLLM does not tell
            busy = simulation.busy
            numbers |= {
                "gpu_memory_total_bytes": float(GPU_MEMORY),
                "gpu_memory_used_bytes": GPU_MEMORY * 0.93,
                "gpu_utilization_perc": busy,
                "gpu_power_watts": 120.0 + busy * (traits.power_limit - 150.0),
                "gpu_power_limit_watts": traits.power_limit,
                "gpu_temperature_celsius": 35.0 + 30.0 * busy,
            }
        return numbers

    def _labels(self) -> dict[str, str]:
        traits = self.traits
        cache = {"block_size": str(BLOCK), "num_gpu_blocks": str(traits.num_blocks)}
        cache["enable_prefix_caching"] = "True"
        return cache | ({"scheduling_policy": "fcfs"} if traits.is_tk else {})

    def _settings(self) -> dict[str, Any]:
        traits = self.traits
        return {
            "version": traits.version,
            "model": traits.model,
            "engine": {
                "model": {
                    "model": traits.model,
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
                    "max_num_seqs": traits.max_num_seqs,
                    "max_num_batched_tokens": traits.max_num_batched_tokens,
                    "scheduling_policy": "fcfs",
                },
            },
            "server": {"host": "0.0.0.0", "port": 8000, "api_key": ["***"], "api_workers": 1},
            "device": {
                "device": "cuda:0",
                "dtype": "bfloat16",
                "attention_backend": "triton",
                "max_model_len": 32768,
                "max_num_batched_tokens": traits.max_num_batched_tokens,
                "num_blocks": traits.num_blocks,
                "block_size": BLOCK,
            },
        }


def demo_sources(clock: Callable[[], float] = time.monotonic) -> list[DemoSource]:
    """The servers of the demo."""
    return [DemoSource(traits, seed, clock) for seed, traits in enumerate(SERVERS, start=1)]
