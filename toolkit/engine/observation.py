"""What a front end counts of the cores' steps and of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.engine.messages import EngineStats
from toolkit.engine.output_processor import SequenceState
from toolkit.metrics import Metrics

if TYPE_CHECKING:
    from toolkit.engine.stream import RequestStream


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


def observe_begin(metrics: Metrics, stream: RequestStream, now: float) -> None:
    """A request's first token has come."""
    metrics.time_to_first_token.observe(now - stream.arrival)
    metrics.observe_prompt(len(stream.state.prompt_token_ids), stream.state.num_cached_tokens)


def observe_end(
    metrics: Metrics, sequence: SequenceState, stream: RequestStream | None, reason: str, now: float
) -> None:
    """A sequence has ended, and its request if it was the last one."""
    metrics.finished(reason)
    metrics.request_generation_tokens.observe(sequence.num_tokens)
    metrics.request_num_preemptions.observe(sequence.num_preemptions)
    if sequence.num_tokens > 1:
        seconds = sequence.last_token - sequence.first_token
        metrics.time_per_output_token.observe(seconds / (sequence.num_tokens - 1))
    if stream is None or not stream.state.finished:
        return
    metrics.e2e_request_latency.observe(now - stream.arrival)
    metrics.request_prompt_tokens.observe(len(stream.state.prompt_token_ids))
    metrics.request_params_n.observe(len(stream.state.sequences))
    longest = max(sequence.num_tokens for sequence in stream.state.sequences)
    metrics.request_max_num_generation_tokens.observe(longest)
    metrics.request_params_max_tokens.observe(stream.request.max_tokens)
    if stream.scheduled and sequence.first_token:
        metrics.inference_time.observe(now - stream.scheduled)
        metrics.prefill_time.observe(sequence.first_token - stream.scheduled)
        metrics.decode_time.observe(now - sequence.first_token)


def total(several: list[EngineStats]) -> EngineStats:
    """The gauges of several cores: sums, and the mean share of their caches in use."""
    if len(several) == 1:
        return several[0]
    return EngineStats(
        num_running=sum(stats.num_running for stats in several),
        num_waiting=sum(stats.num_waiting for stats in several),
        kv_cache_usage=sum(stats.kv_cache_usage for stats in several) / max(1, len(several)),
    )
