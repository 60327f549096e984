"""What a front end counts of the cores' steps and of its requests."""

from __future__ import annotations

from toolkit.engine.messages import EngineStats
from toolkit.metrics import Metrics


def observe_gauges(metrics: Metrics, stats: EngineStats) -> None:
    """Sets what a core has to do now."""
    metrics.num_requests_running.set(stats.num_running)
    metrics.observe_waiting(stats.num_waiting)
    metrics.kv_cache_usage.set(stats.kv_cache_usage)


def observe_step(metrics: Metrics, stats: EngineStats) -> None:
    """Sets the gauges and adds the counts of a step."""
    observe_gauges(metrics, stats)
    if stats.prefix_cache_queries:
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits)
    if stats.num_preemptions:
        metrics.num_preemptions.inc(stats.num_preemptions)
    if stats.num_tokens:
        metrics.iteration_tokens.observe(stats.num_tokens)
        metrics.batch_size.observe(stats.num_running)
        metrics.throughput.add(stats.num_tokens, stats.num_sampled)
        metrics.observe_work(stats.work)
    if stats.block_times:
        metrics.observe_blocks(stats.block_times)


def total(several: list[EngineStats]) -> EngineStats:
    """The gauges of several cores: sums, and the mean share of their caches in use."""
    if len(several) == 1:
        return several[0]
    return EngineStats(
        num_running=sum(stats.num_running for stats in several),
        num_waiting=sum(stats.num_waiting for stats in several),
        kv_cache_usage=sum(stats.kv_cache_usage for stats in several) / max(1, len(several)),
    )
