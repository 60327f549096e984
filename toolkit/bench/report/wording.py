"""Descriptions of a run's load and problems, for the table and the HTML report."""

import math
from collections.abc import Iterator

from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.saturation import REMEDY
from toolkit.bench.report.stats import RunResult
from toolkit.config.load import BenchConfig

MULTI_TOKEN = 1.01  # mean tokens per chunk above which chunks are reported to carry several tokens
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
"""Displayed names of the latencies."""


def describe_load(config: BenchConfig) -> str:
    """Describe the arrivals and the number of requests."""
    text = _arrivals(config)
    if config.is_paced and config.max_concurrency is not None:
        text += f", at most {config.max_concurrency:,} at a time"
    if config.max_requests is not None:
        text += f", {config.max_requests:,} requests"
    if config.duration is not None:
        text += f", for {config.duration:g} s"
    return text


def _arrivals(config: BenchConfig) -> str:
    if config.is_replayed:
        return "at the times of the trace"
    if not config.is_paced:
        return (
            f"{config.max_concurrency:,} requests at a time"
            if config.max_concurrency
            else "all at once"
        )
    if config.ramp_up_strategy is not None:
        ends = f"{config.ramp_up_start_rps:g} to {config.ramp_up_end_rps:g}"
        rate = f"{ends} ({config.ramp_up_strategy})"
    else:
        rate = f"{config.request_rate:g}"
    kind = {1.0: "Poisson", math.inf: "constant"}.get(
        config.burstiness, f"gamma ({config.burstiness:g})"
    )
    bursts = f" in bursts of {config.burst_size}" if config.burst_size > 1 else ""
    return f"{rate} requests/s, {kind} arrivals{bursts}"


def describe_prompts(config: BenchConfig) -> str:
    """Describe the prompts and the length of the answers."""
    if config.dataset_path is not None:
        text = f"{config.dataset_name}, {config.dataset_path}"
        return text if config.output_len is None else f"{text}, {config.output_len:,} tokens out"
    spread = f", each ±{config.random_range_ratio:.0%}" if config.random_range_ratio else ""
    unit = "words" if config.is_chat else "tokens"
    prefix = ""
    if config.dataset_name == "prefix":
        prefix = f"one of {config.num_prefixes} prefixes of {config.prefix_len:,} {unit} and "
    output_len = config.output_len or config.random_output_len
    if config.is_sound:
        return f"{config.clip_seconds:g} s of noise in, {output_len:,} tokens out{spread}"
    return (
        f"{config.dataset_name}, {prefix}{config.random_input_len:,} {unit} in, "
        f"{output_len:,} tokens out{spread}"
    )


def describe_client(config: BenchConfig, result: RunResult) -> str:
    """Describe the client's CPU use and delays."""
    text = f"{result.cpu_share:.0%} of a core"
    if result.num_clients > 1:
        text = f"{result.num_clients} processes, the busiest used {text}"
    if config.is_paced and result.send_lag is not None:
        text += (
            f"; sent {ms(result.send_lag.at(50))} late (p50), {ms(result.send_lag.at(99))} (p99)"
        )
    return text


def describe_server(outcome: Outcome) -> str | None:
    """Describe the server's own metrics. Returns None if it has none."""
    server = outcome.server
    if server is None:
        return None
    ratio, preempted = server.prefix_hit_ratio, server.increase("num_preemptions")
    parts = []
    if ratio is not None:
        parts.append(f"{ratio:.0%} of prompt tokens cached")
    if preempted is not None:
        parts.append(f"{preempted:,.0f} preemptions")
    if server.draft_acceptance is not None:
        parts.append(f"{server.draft_acceptance:.0%} of draft tokens right")
    if server.queue_s is not None:
        parts.append(f"{ms(server.queue_s)} queued (mean)")
    return ", ".join(parts) or None


def problems(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield (style, sentence) for everything that limits the validity of the result."""
    config, result, server = outcome.config, outcome.result, outcome.server
    if outcome.interrupted:
        yield "yellow", f"Interrupted; {result.num_unfinished:,} requests had not ended."
    elif not result.num_sent:
        yield (
            "yellow",
            "No request arrived before the end. Set a longer --duration or a higher rate.",
        )
    for group in result.errors:
        yield "red", f"{group.count:,} x {group.cause}: {group.example}"
    if has_no_token_counts(result):
        yield (
            "yellow",
            "The server does not report token counts. Each chunk counts as one token, so token "
            "rates, TPOT and ITL are those of chunks.",
        )
    elif config.ignore_eos and result.output_tokens < result.output_tokens_asked:
        yield (
            "yellow",
            f"The answers were shorter than requested: {result.output_tokens:,} of "
            f"{result.output_tokens_asked:,} tokens.",
        )
    if has_multi_token_chunks(result) and not result.has_token_counts:
        yield (
            "yellow",
            f"Events carried {result.output_tokens / max(result.chunks, 1):.2f} tokens on average "
            "and do not say how many each: ITL is the mean of each request.",
        )
    if server is not None and server.was_busy:
        yield "yellow", "The server had other requests when the run began."
    # After a failure or an interrupt, the server may have generated tokens that never arrived.
    is_complete = not outcome.interrupted and not result.num_failed
    if server is not None and is_complete and server.served_others(result.output_tokens):
        yield (
            "yellow",
            "The server generated more tokens than this client received: it had other clients.",
        )
    if result.saturated is not None:
        yield (
            "bold red",
            f"CLIENT SATURATED: {result.saturated}.\nThroughput and latencies would be the "
            f"client's, not the server's, and are left out. Lower the load, or {REMEDY}.",
        )


def has_no_token_counts(result: RunResult) -> bool:
    """Return True if the server reported no token counts, of prompts or of answers."""
    return result.chunks > 0 and not result.has_token_counts and result.prompt_tokens == 0


def has_multi_token_chunks(result: RunResult) -> bool:
    """Return True if chunks carried noticeably more than one token each."""
    return result.output_tokens > MULTI_TOKEN * result.chunks


def ms(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 or math.isclose(seconds, 0.0) else 2
    return f"{seconds * 1e3:,.{digits}f} ms"
