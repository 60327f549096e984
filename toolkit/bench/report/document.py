"""A result for programs: one JSON document, and one line of JSON for each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import orjson

from toolkit.bench.load.record import RequestRecord
from toolkit.bench.report.client_machine import environment
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.stats import Latencies, Steady
from toolkit.bench.report.summary import Estimate, Summary

SCHEMA = "tk-bench/2"  # a new number when a key changes its meaning or goes
RESOLUTION = 7
"""Digits of a second, of what there is one for each chunk of."""
SECRET = ("api_key", "header")
"""Settings that are not written down."""


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The result, with seconds under keys that end in _s. Numbers that there are none of are null; `_ci` is an interval
    of 95 % confidence, null at an end that is open.
    """
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
        "itl_per": "token" if result.sizes_known else "token, by the mean of its request's chunks",
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
    }


def settings(outcome: Outcome) -> dict[str, Any]:
    """All that was set, without keys; a rate without a limit is null."""
    found = {k: v for k, v in dataclasses.asdict(outcome.config).items() if k not in SECRET}
    return {name: None if value == float("inf") else value for name, value in found.items()}


def latencies(found: Latencies) -> dict[str, Any]:
    """As JSON, each under its name and _s."""
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


def _estimate(name: str, estimate: Estimate) -> dict[str, Any]:
    return {name: estimate.value, f"{name}_ci": [estimate.low, estimate.high]}


def _summary(summary: Summary | None) -> dict[str, Any] | None:
    return None if summary is None else summary.as_json()


def request_lines(outcome: Outcome) -> Iterator[bytes]:
    """Each request, as it was scheduled, on a line of its own. Moments are seconds after the beginning."""
    for record in sorted(outcome.records, key=lambda r: (r.scheduled, r.number)):
        yield orjson.dumps(_request(record), option=orjson.OPT_APPEND_NEWLINE)


def _request(record: RequestRecord) -> dict[str, Any]:
    answered = record.ok and record.first_token is not None
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
        "ttft_s": record.ttft if answered else None,
        "tpot_s": record.tpot if answered else None,
        "e2el_s": record.e2el if record.ok else None,
        "chunk_gaps_s": [round(gap, RESOLUTION) for gap in record.gaps],
        "chunk_tokens": record.sizes.tolist() if record.sizes_known else None,
        "error": None
        if record.error is None
        else {"cause": record.error[0], "example": record.error[1]},
    }
