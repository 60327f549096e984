"""Arrival times of requests. The schedule is fixed before the run, so a slow send delays no other.

Every schedule is a renewal process of one request per second on average, stretched so that its rate
at each moment is the configured one."""

import math

import numpy as np
from numpy.typing import NDArray

from toolkit.config.load import BenchConfig

Times = NDArray[np.float64]  # seconds after the start, ascending, `[num_requests]`


def schedule(config: BenchConfig, seed: int) -> Times:
    """Return the arrivals of a config that has a rate.

    The schedule ends after `max_requests` arrivals or at `duration` seconds, whichever is first."""
    rng = np.random.default_rng(seed)
    count, duration = config.max_requests, config.duration
    if config.ramp_up_strategy is None:
        if math.isinf(config.request_rate):
            assert count is not None, "a config without a rate has a count"
            return np.zeros(count)
        limit = _upper_bound(config, config.request_rate) if count is None else count
        times = unit_times(rng, limit, config.burstiness, config.burst_size) / config.request_rate
    else:
        assert config.ramp_up_start_rps is not None
        assert config.ramp_up_end_rps is not None
        rates = (config.ramp_up_start_rps, config.ramp_up_end_rps)
        if count is None:
            assert duration is not None, "a config has a count or a duration"
            limit = _upper_bound(config, max(rates))
            unit = unit_times(rng, limit, config.burstiness, config.burst_size)
            times = ramp_by_time(unit, *rates, duration, config.ramp_up_strategy)
        else:
            unit = unit_times(rng, count, config.burstiness, config.burst_size)
            times = ramp_by_number(unit, *rates, config.ramp_up_strategy)
    return times if duration is None else times[times < duration]


def unit_times(rng: np.random.Generator, count: int, burstiness: float, burst_size: int) -> Times:
    """Return `count` arrivals, one per second on average, in bursts of `burst_size`.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is Poisson, infinity is constant.
    """
    bursts = math.ceil(count / burst_size)
    if math.isinf(burstiness):
        gaps = np.ones(bursts)
    else:
        gaps = rng.gamma(burstiness, 1 / burstiness, bursts)
    return np.repeat(np.cumsum(gaps) * burst_size, burst_size)[:count]


def ramp_by_number(unit: Times, start: float, end: float, strategy: str) -> Times:
    """Stretch arrivals so that the rate goes from `start` at the first one to `end` at the last."""
    progress = np.arange(len(unit)) / max(len(unit) - 1, 1)
    return np.cumsum(np.diff(unit, prepend=0.0) / rate_at(progress, start, end, strategy))


def ramp_by_time(unit: Times, start: float, end: float, duration: float, strategy: str) -> Times:
    """Stretch arrivals so that the rate goes from `start` at 0 to `end` after `duration` seconds.

    Later arrivals are dropped. An arrival of the unit process at u happens when the integral of the
    rate reaches u."""
    grid = np.linspace(0.0, 1.0, 10_001)
    rates = rate_at(grid, start, end, strategy)
    steps = (rates[1:] + rates[:-1]) / 2 * np.diff(grid) * duration
    expected = np.concatenate(([0.0], np.cumsum(steps)))
    times: Times = np.interp(unit[unit < expected[-1]], expected, grid * duration)
    return times


def rate_at(progress: Times, start: float, end: float, strategy: str) -> Times:
    """Return the rate of a ramp. `progress` goes from 0 to 1."""
    if strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


def _upper_bound(config: BenchConfig, rate: float) -> int:
    """Return a number of arrivals that is almost never exceeded within the duration."""
    assert config.duration is not None, "a config has a count or a duration"
    bursts = rate * config.duration / config.burst_size
    deviation = math.sqrt(bursts * max(1.0, 1 / config.burstiness))
    return math.ceil(bursts + 10 * deviation + 10 / config.burstiness + 20) * config.burst_size
