"""A run's load and its problems, in words: for the table and for the report with plots."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.saturation import REMEDY
from toolkit.bench.report.stats import Result
from toolkit.config.load import BenchConfig

SEVERAL = 1.01
"""Tokens of a chunk, on average, that are worth a word."""
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
"""What latencies are called where people read."""


def describe_load(config: BenchConfig) -> str:
    """When requests come, and how many."""
    text = _arrivals(config)
    if config.paced and config.max_concurrency is not None:
        text += f", at most {config.max_concurrency:,} at a time"
    if config.count is not None:
        text += f", {config.count:,} requests"
    if config.duration is not None:
        text += f", for {config.duration:g} s"
    return text


def _arrivals(config: BenchConfig) -> str:
    if config.replayed:
        return "at the times of the trace"
    if not config.paced:
        return (
            f"{config.max_concurrency:,} requests at a time"
            if config.max_concurrency
            else "all at once"
        )
    if config.ramp_up_strategy is not None:
        rate = f"{config.ramp_up_start_rps:g} to {config.ramp_up_end_rps:g} ({config.ramp_up_strategy})"
    else:
        rate = f"{config.request_rate:g}"
    kind = {1.0: "Poisson", math.inf: "constant"}.get(
        config.burstiness, f"gamma ({config.burstiness:g})"
    )
    together = f" in bursts of {config.burst_size}" if config.burst_size > 1 else ""
    return f"{rate} requests/s, {kind} arrivals{together}"


def describe_prompts(config: BenchConfig) -> str:
    """What each request carries and asks for."""
    if config.dataset_path is not None:
        text = f"{config.dataset_name}, {config.dataset_path}"
        return text if config.output_len is None else f"{text}, {config.output_len:,} tokens out"
    spread = f", each ±{config.random_range_ratio:.0%}" if config.random_range_ratio else ""
    unit = "words" if config.chat else "tokens"
    before = ""
    if config.dataset_name == "prefix":
        before = f"one of {config.num_prefixes} prefixes of {config.prefix_len:,} {unit} and "
    out = config.output_len or config.random_output_len
    return f"{config.dataset_name}, {before}{config.random_input_len:,} {unit} in, {out:,} tokens out{spread}"


def describe_client(config: BenchConfig, result: Result) -> str:
    """How the client itself fared."""
    text = f"{result.cpu_share:.0%} of a core"
    if result.num_clients > 1:
        text = f"{result.num_clients} processes, the busiest used {text}"
    if config.paced and result.send_lag is not None:
        text += (
            f"; sent {ms(result.send_lag.at(50))} late (p50), {ms(result.send_lag.at(99))} (p99)"
        )
    return text


def describe_server(outcome: Outcome) -> str | None:
    """What the server counted; None when it does not say."""
    server = outcome.server
    if server is None:
        return None
    ratio, preempted = server.prefix_hit_ratio, server.counted("num_preemptions")
    parts = []
    if ratio is not None:
        parts.append(f"{ratio:.0%} of prompt tokens cached")
    if preempted is not None:
        parts.append(f"{preempted:,.0f} preemptions")
    if server.queue_s is not None:
        parts.append(f"{ms(server.queue_s)} queued (mean)")
    return ", ".join(parts) or None


def problems(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """(style, sentence) for everything that the reader must know before believing the numbers."""
    config, result, server = outcome.config, outcome.result, outcome.server
    if outcome.interrupted:
        yield "yellow", f"Interrupted; {result.num_unfinished:,} requests had not ended."
    elif not result.num_sent:
        yield (
            "yellow",
            "No request came before the end: --duration and the rate say how many there are.",
        )
    for group in result.errors:
        yield "red", f"{group.count:,} x {group.cause}: {group.example}"
    if counts_nothing(result):
        yield (
            "yellow",
            "The server does not say how many tokens it made: a chunk counts as one, so that rates of tokens, TPOT and "
            "ITL are those of chunks.",
        )
    elif config.ignore_eos and result.output_tokens < result.output_tokens_asked:
        yield (
            "yellow",
            f"The answers were shorter than asked: {result.output_tokens:,} of "
            f"{result.output_tokens_asked:,} tokens.",
        )
    if carry_several(result) and not result.sizes_known:
        yield (
            "yellow",
            f"Chunks carried {result.output_tokens / max(result.chunks, 1):.2f} tokens on average, and do not say how "
            "many each: ITL spreads a gap evenly, by the mean of its request.",
        )
    if server is not None and server.was_busy:
        yield "yellow", "The server had other requests when the run began."
    ended_well = not outcome.interrupted and not result.num_failed  # else some of ours never came
    if server is not None and ended_well and server.served_others(result.output_tokens):
        yield "yellow", "The server made more tokens than came here: it served others, too."
    if result.saturated is not None:
        yield (
            "bold red",
            f"CLIENT SATURATED: {result.saturated}.\nThroughput and latencies would be the client's, not the server's, "
            f"and are left out. Lower the load, or {REMEDY}.",
        )


def counts_nothing(result: Result) -> bool:
    """Whether the server counted no tokens, neither those of the prompts nor those of the answers."""
    return result.chunks > 0 and not result.sizes_known and result.prompt_tokens == 0


def carry_several(result: Result) -> bool:
    """Whether chunks carried noticeably more than a token each."""
    return result.output_tokens > SEVERAL * result.chunks


def ms(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 or math.isclose(seconds, 0.0) else 2
    return f"{seconds * 1e3:,.{digits}f} ms"
