"""Statistics of several engines; completeness of the tables of policies and counters."""

from __future__ import annotations

from typing import get_args, get_type_hints

from toolkit.config import SchedulerConfig
from toolkit.metrics import Metrics
from toolkit.scheduler.queue import POLICIES
from toolkit.scheduler.stats import COUNTERS, EngineStats, total


def test_totals_are_sums_and_the_mean_usage():
    one = EngineStats(num_running=2, kv_cache_usage=0.5, num_preemptions=3, num_tokens=7)
    other = EngineStats(num_running=4, num_waiting=1, kv_cache_usage=0.1, prefix_cache_hits=5)
    together = total([one, other])
    assert (together.num_running, together.num_waiting, together.num_tokens) == (6, 1, 7)
    assert (together.num_preemptions, together.prefix_cache_hits) == (3, 5)
    assert abs(together.kv_cache_usage - 0.3) < 1e-9
    assert total([one]) is one
    assert total([]) == EngineStats()


def test_every_counter_has_a_metric():
    metrics = Metrics("tk", "m")
    assert len(COUNTERS) >= 3
    for name in COUNTERS:
        getattr(metrics, name).inc(2)
        assert f"tk:{name}_total" in metrics.expose().decode()


def test_every_policy_of_the_flag_has_a_rank():
    hints = get_type_hints(SchedulerConfig)
    assert set(get_args(hints["scheduling_policy"])) == set(POLICIES)
