"""Throughput in the log and the gauges, and metrics that describe the server."""

import asyncio
import logging
import platform
from collections.abc import Sequence

from toolkit.config import options
from toolkit.config.engine import PARTS
from toolkit.metrics import Metrics
from toolkit.serving.front import FrontEnd, LoadedModel
from toolkit.version import __version__

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between log lines, and window of the rates


async def log_stats(front: FrontEnd, *, log: bool) -> None:
    """Set the throughput gauges and, under load, log a line, every INTERVAL. Never returns."""
    was_busy = False
    while True:
        steps, computed, generated = front.metrics.observe_throughput()
        stats = front.stats
        # The step of a health probe is no load.
        is_busy = steps > 1.0 / INTERVAL or bool(stats.num_running or stats.num_waiting)
        if log and (is_busy or was_busy):
            logger.info(
                "%.1f tokens/s generated, %.1f computed, %.1f steps/s; %d running, %d waiting; "
                "KV cache %.1f%% used",
                generated,
                computed,
                steps,
                stats.num_running,
                stats.num_waiting,
                100 * stats.kv_cache_usage,
            )
        was_busy = is_busy
        await asyncio.sleep(INTERVAL)


def set_info_metrics(front: FrontEnd, models: Sequence[LoadedModel]) -> None:
    """Set the metrics that describe versions, settings and the machine."""
    for model in models:
        _describe(front.metrics.for_model(model.setup.names[0]), model)
    front.metrics.observe_machine(gpu=any(model.info.device != "cpu" for model in models))


def _describe(metrics: Metrics, model: LoadedModel) -> None:
    engine, info = model.setup.engine, model.info
    versions = {
        "version": __version__,
        "python_version": platform.python_version(),
        "device": info.device,
    }
    metrics.describe("build_info", "Versions of tk and Python, and the device.", versions)
    cache = {
        "block_size": info.block_size,
        "num_gpu_blocks": sum(one.num_blocks for one in model.infos),
        "num_cpu_blocks": sum(one.num_host_blocks for one in model.infos),
        "groups": "; ".join(
            f"{one.kept}, {info.block_size * one.blocks_per_page} in a block" for one in info.groups
        ),
        "cache_bytes": sum(one.cache_bytes for one in model.infos),
        "enable_prefix_caching": engine.cache.enable_prefix_caching,
        "cache_dtype": engine.cache.kv_cache_dtype,
        "gpu_memory_utilization": engine.cache.gpu_memory_utilization,
    }
    metrics.describe(
        "cache_config_info",
        "KV cache of all engines together.",
        {name: str(value) for name, value in cache.items()},
    )
    settings = {
        row.name: str(getattr(getattr(engine, part), row.name))
        for part in PARTS
        for row in options(PARTS[part])
        if row.name != "chat_template"  # it may be private text, and /metrics needs no key
    }
    metrics.describe("config_info", "Engine settings.", settings)
