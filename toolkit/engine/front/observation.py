"""Update metrics from the statistics of a core's step."""

from toolkit.metrics import Metrics
from toolkit.scheduler.stats import COUNTERS, EngineStats


def observe_gauges(metrics: Metrics, stats: EngineStats) -> None:
    """Set the gauges of a core's current load."""
    metrics.num_requests_running.set(stats.num_running)
    metrics.observe_waiting(stats.num_waiting)
    metrics.kv_cache_usage.set(stats.kv_cache_usage)
    if stats.adapters is not None:
        metrics.observe_adapters(stats.adapters)


def observe_step(metrics: Metrics, stats: EngineStats) -> None:
    """Set the gauges and add the counters of a step."""
    observe_gauges(metrics, stats)
    for name in COUNTERS:
        if count := getattr(stats, name):
            getattr(metrics, name).inc(count)
    if stats.accepted_per_position:
        metrics.observe_accepted(stats.accepted_per_position)
    if stats.num_tokens:
        metrics.iteration_tokens.observe(stats.num_tokens)
        metrics.batch_size.observe(stats.num_running)
        metrics.throughput.add(stats.num_tokens, stats.num_sampled)
        metrics.observe_work(stats.work)
    if stats.block_times:
        metrics.observe_blocks(stats.block_times)
