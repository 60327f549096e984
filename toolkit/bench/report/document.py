"""Machine-readable results: one JSON document, and one line of JSON per request."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from toolkit.bench.load.record import RequestRecord
from toolkit.bench.report.client_machine import environment
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.stats import Latencies, Steady
from toolkit.bench.report.summary import IntervalEstimate, Summary

SCHEMA = "tk-bench/2"  # increase the number when a key changes its meaning or is removed
GAP_DIGITS = 7  # decimals of a chunk's gap in seconds
SECRET_SETTINGS = ("api_key", "header")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the result. Keys that end in _s hold seconds; unknown numbers are null.

    `_ci` is a 95 % confidence interval. An open end is null."""
    result = outcome.result
    return {
        "schema": SCHEMA,
        "date": outcome.began.isoformat(timespec="seconds"),
        "environment": environment(),
        "server": {
            "url": outcome.config.url,
            "model": outcome.model,
            "version": outcome.server_version,
        },
        "settings": settings(outcome),
        "metadata": dict(text.split("=", 1) for text in outcome.config.metadata),
        "interrupted": outcome.interrupted,
        "wall_s": result.wall,
        "requests": {
            "sent": result.num_sent,
            "succeeded": result.num_succeeded,
            "failed": result.num_failed,
            "unfinished": result.num_unfinished,
            "max_in_flight": result.max_in_flight,
            "offered_per_s": result.offered_rate,
            "sent_per_s": result.sent_rate,
        },
        "tokens": {
            "prompt": result.prompt_tokens,
            "prompt_cached": result.cached_tokens,
            "output": result.output_tokens,
            "output_asked": result.output_tokens_asked,
            "chunks": result.chunks,
        },
        "throughput": {
            "requests_per_s": result.per_second(result.num_succeeded),
            "output_tokens_per_s": result.per_second(result.output_tokens),
            "prompt_tokens_per_s": result.per_second(result.prompt_tokens),
            "sound_seconds_per_s": outcome.sound_per_second,
        },
        "goodput": {
            "objectives_s": outcome.config.objectives,
            "good": result.num_good,
            "share": result.good_share,
            "requests_per_s": None
            if result.num_good is None
            else result.per_second(result.num_good),
        },
        **latencies(result.latencies),
        "itl_per": "token"
        if result.has_token_counts
        else "token, by the mean of its request's chunks",
        "steady": None if result.steady is None else _steady(result.steady),
        "client": {
            "saturated": result.saturated,
            "processes": result.num_clients,
            "cpu_share": result.cpu_share,
            "send_lag_s": _summary(result.send_lag),
            "place_wait_s": _summary(result.place_wait),
            "loop_delay_s": _summary(result.loop_delay),
        },
        "server_metrics": None if outcome.server is None else outcome.server.as_json(),
        "errors": [dataclasses.asdict(group) for group in result.errors],
        **vllm_fields(outcome),
    }


def vllm_fields(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of the result of `vllm bench serve`: names, meanings and milliseconds.

    Latencies count from sending, as there. Without answers there are none."""
    result, config = outcome.result, outcome.config
    done = [record for record in outcome.records if record.ok]
    answered = [record for record in done if record.first_token is not None]
    values: dict[str, Any] = {
        "ttft": [record.service_ttft for record in answered],
        "tpot": [record.tpot for record in answered if record.tpot is not None],
        "itl": np.concatenate([*(record.token_gaps() for record in answered), ()]),
        "e2el": [record.service_e2el for record in done],
    }
    found = {
        "model_id": outcome.model,
        "num_prompts": result.num_sent,
        "request_rate": config.request_rate if math.isfinite(config.request_rate) else "inf",
        "burstiness": config.burstiness if math.isfinite(config.burstiness) else "inf",
        "max_concurrency": config.max_concurrency,
        "duration": result.wall,
        "completed": result.num_succeeded,
        "total_input_tokens": result.prompt_tokens,
        "total_output_tokens": result.output_tokens,
        "request_throughput": result.per_second(result.num_succeeded),
        "request_goodput": result.num_good and result.per_second(result.num_good),
        "output_throughput": result.per_second(result.output_tokens),
        "total_token_throughput": result.per_second(result.prompt_tokens + result.output_tokens),
        "max_concurrent_requests": result.max_in_flight,
        "rtfx": outcome.sound_per_second,
    }
    for name in config.metrics:
        if len(values[name]):
            times = np.asarray(values[name]) * 1e3
            found |= {
                f"mean_{name}_ms": float(times.mean()),
                f"median_{name}_ms": float(np.median(times)),
                f"std_{name}_ms": float(times.std()),
            }
            for percent in config.percentiles:
                found[f"p{percent:g}_{name}_ms"] = float(np.percentile(times, percent))
    return found


def settings(outcome: Outcome) -> dict[str, Any]:
    """Return all settings except secrets. An infinite value is null."""
    found = {
        k: v for k, v in dataclasses.asdict(outcome.config).items() if k not in SECRET_SETTINGS
    }
    return {name: None if value == float("inf") else value for name, value in found.items()}


def latencies(found: Latencies) -> dict[str, Any]:
    """Return the latencies under their names with the suffix _s."""
    return {
        f"{field.name}_s": _summary(getattr(found, field.name))
        for field in dataclasses.fields(Latencies)
    }


def _steady(steady: Steady) -> dict[str, Any]:
    return {
        "from_s": steady.window.start,
        "to_s": steady.window.end,
        "in_flight": steady.in_flight,
        **_estimate("requests_per_s", steady.requests_per_s),
        **_estimate("output_tokens_per_s", steady.output_tokens_per_s),
        **latencies(steady.latencies),
    }


def _estimate(name: str, estimate: IntervalEstimate) -> dict[str, Any]:
    return {name: estimate.value, f"{name}_ci": [estimate.low, estimate.high]}


def _summary(summary: Summary | None) -> dict[str, Any] | None:
    return None if summary is None else summary.as_json()


def request_lines(outcome: Outcome) -> Iterator[bytes]:
    """Yield a line of JSON per request in scheduled order. Times are seconds after the start."""
    for record in sorted(outcome.records, key=lambda r: (r.scheduled, r.number)):
        yield orjson.dumps(_request(record), option=orjson.OPT_APPEND_NEWLINE)


def _request(record: RequestRecord) -> dict[str, Any]:
    has_answer = record.ok and record.first_token is not None
    return {
        "number": record.number,
        "scheduled_s": record.scheduled,
        "sent_s": record.sent,
        "first_token_s": record.first_token,
        "last_token_s": record.last_token,
        "ended_s": record.ended,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "max_tokens": record.max_tokens,
        "ttft_s": record.ttft if has_answer else None,
        "tpot_s": record.tpot if has_answer else None,
        "e2el_s": record.e2el if record.ok else None,
        "chunk_gaps_s": [round(gap, GAP_DIGITS) for gap in record.chunk_gaps],
        "chunk_tokens": record.chunk_tokens.tolist() if record.has_token_counts else None,
        "error": None
        if record.error is None
        else {"cause": record.error[0], "example": record.error[1]},
    }
