"""What the server tells of its work now and again, and of itself once."""

from __future__ import annotations

import asyncio
import logging
import platform

from toolkit.config import EngineConfig, options
from toolkit.config.engine import PARTS
from toolkit.serving.front import Front, Served
from toolkit.version import __version__

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two lines in the log, and over which rates are taken."""


async def tell_stats(front: Front, *, log: bool) -> None:
    """Sets the gauges of throughput and, while there is work, writes a line to the log. Never ends."""
    was_busy = False
    while True:
        steps, computed, generated = front.metrics.observe_throughput()
        stats = front.stats
        is_busy = steps > 1.0 / INTERVAL or bool(
            stats.num_running or stats.num_waiting
        )  # a probe's step is no work
        if log and (is_busy or was_busy):
            logger.info(
                "%.1f tokens/s generated, %.1f computed, %.1f steps/s; %d running, %d waiting; KV cache %.1f%% used",
                generated,
                computed,
                steps,
                stats.num_running,
                stats.num_waiting,
                100 * stats.kv_cache_usage,
            )
        was_busy = is_busy
        await asyncio.sleep(INTERVAL)


def describe(front: Front, engine: EngineConfig, served: Served) -> None:
    """The metrics that tell of builds, settings and the machine."""
    metrics, info = front.metrics, served.info
    versions = {
        "version": __version__,
        "python_version": platform.python_version(),
        "device": info.device,
    }
    metrics.describe("build_info", "Versions of what runs.", versions)
    cache = {
        "block_size": info.block_size,
        "num_gpu_blocks": sum(one.num_blocks for one in served.infos),
        "num_cpu_blocks": sum(one.num_host_blocks for one in served.infos),
        "cache_bytes": sum(one.cache_bytes for one in served.infos),
        "enable_prefix_caching": engine.cache.enable_prefix_caching,
        "cache_dtype": engine.cache.kv_cache_dtype,
        "gpu_memory_utilization": engine.cache.gpu_memory_utilization,
    }
    metrics.describe(
        "cache_config_info",
        "The KV cache, of all engines together.",
        {name: str(value) for name, value in cache.items()},
    )
    settings = {
        row.name: str(getattr(getattr(engine, part), row.name))
        for part in PARTS
        for row in options(PARTS[part])
        if row.name != "chat_template"  # it may be a whole text, and everybody may read the metrics
    }
    metrics.describe("config_info", "The engine's settings.", settings)
    metrics.observe_machine(gpu=info.device != "cpu")
