"""Outcomes of simulated runs."""

from __future__ import annotations

import datetime
from array import array

import numpy as np

from toolkit.bench.load.record import ClientResult, RequestRecord
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.stats import evaluate
from toolkit.config.load import BenchConfig


def outcome(
    *,
    ttft: float = 0.1,
    itl: float = 0.01,
    tokens: int = 21,
    rate: float = 20.0,
    seconds: float = 30.0,
    fail_every: int = 0,
    seed: int = 0,
    **settings,
) -> Outcome:
    """Return the outcome of requests that arrive evenly. Times are in seconds and vary by 20 %."""
    rng = np.random.default_rng(seed)
    config = BenchConfig(request_rate=rate, duration=seconds, seed=seed, **settings)
    records = []
    for number, start in enumerate(np.arange(0.0, seconds, 1 / rate).tolist()):
        gaps = array("d", itl * rng.uniform(0.8, 1.2, tokens - 1))
        first = start + ttft * rng.uniform(0.8, 1.2)
        last = first + sum(gaps)
        fails = fail_every and number % fail_every == 0
        records.append(
            RequestRecord(
                number=number, scheduled=start, started=start, sent=start + 0.001,
                first_token=first, last_token=last,
                ended=last, max_tokens=tokens, prompt_tokens=128, output_tokens=tokens,
                chunk_gaps=gaps, chunk_tokens=array("q", [1] * len(gaps)),
                error=("HTTP 503", "<full>") if fails else None,
            )
        )  # fmt: skip
    result = evaluate(
        [ClientResult(records)],
        is_paced=True,
        percentiles=config.percentiles,
        objectives=config.objectives,
    )
    began = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    return Outcome(config, "org/model", result, records, False, None, "1.2.3", began)
