"""Detects a client that is too slow to measure the server."""

import numpy as np

from toolkit.bench.load.record import ClientResult

MAX_DELAY = 0.010  # seconds: at rates worth measuring, a longer delay distorts the result
MAX_CPU_SHARE = 0.95  # of one core: an event loop cannot use more than one
MIN_CPU_SHARE = 0.5  # of one core: a late client that uses less is waiting for a core
MIN_WALL = 1.0  # seconds: in a shorter run the initial burst alone looks like a busy client

REMEDY = "send from more processes (--clients N) or from another machine"
"""Advice in addition to a lower load."""


def client_saturation(client: ClientResult, wall: float, *, is_paced: bool) -> str | None:
    """Return why this client was the bottleneck, or None. `is_paced`: arrivals had a schedule."""
    lags = [
        r.started - r.scheduled
        for r in client.records
        if r.sent is not None and r.started is not None
    ]
    lag = float(np.percentile(lags, 90)) if is_paced and lags else 0.0
    delays = np.frombuffer(client.loop_delays)
    delay = float(np.percentile(delays, 90)) if len(delays) else 0.0
    return saturation(lag, delay, client.cpu_share, wall)


def saturation(send_lag: float, loop_delay: float, cpu_share: float, wall: float) -> str | None:
    """Return why a client was the bottleneck, or None.

    `send_lag` and `loop_delay` are 90th percentiles in seconds. `send_lag` is 0 without a schedule.
    """
    cause = (
        f", though it used {cpu_share:.0%} of a core: the machine is busy"
        if cpu_share < MIN_CPU_SHARE
        else ""
    )
    if send_lag > MAX_DELAY:
        return f"a tenth of the requests were sent more than {send_lag * 1e3:.0f} ms late{cause}"
    if wall < MIN_WALL:
        return None
    if cpu_share > MAX_CPU_SHARE:
        return f"it used {cpu_share:.0%} of its one core"
    if loop_delay > MAX_DELAY:
        return f"its event loop was often more than {loop_delay * 1e3:.0f} ms late{cause}"
    return None
