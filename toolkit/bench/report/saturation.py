"""Whether it was the client that was too slow, and not the server."""

from __future__ import annotations

import numpy as np

from toolkit.bench.load.record import Share

LATE = 0.010  # seconds: at rates worth measuring, a client this late distorts what it measures
BUSY = 0.95  # share of one core: one event loop has no more than one
LAZY = 0.5  # share of one core: a client that uses less is late because others have the cores
SETTLED = 1.0  # seconds: in shorter runs the opening burst alone looks like a busy client


REMEDY = "send from more processes, --clients N, or from another machine"
"""What to do about it, besides a lower load."""


def share_saturation(share: Share, wall: float, *, paced: bool) -> str | None:
    """Why this client, not the server, was a bottleneck; None when it was not. `paced`: its arrivals followed a clock."""
    lags = [
        r.woken - r.scheduled for r in share.records if r.sent is not None and r.woken is not None
    ]
    lag = float(np.percentile(lags, 90)) if paced and lags else 0.0
    delay = float(np.percentile(np.frombuffer(share.loop_delays), 90)) if share.loop_delays else 0.0
    return saturation(lag, delay, share.cpu_share, wall)


def saturation(send_lag: float, loop_delay: float, cpu_share: float, wall: float) -> str | None:
    """Why a client was the bottleneck; None when it was not.

    `send_lag` and `loop_delay` are 90th percentiles, in seconds; the former is 0 where arrivals follow no clock.
    """
    waits = (
        f", though it used {cpu_share:.0%} of a core: the machine is busy"
        if cpu_share < LAZY
        else ""
    )
    if send_lag > LATE:
        return f"a tenth of the requests were sent more than {send_lag * 1e3:.0f} ms late{waits}"
    if wall < SETTLED:
        return None
    if cpu_share > BUSY:
        return f"it used {cpu_share:.0%} of its one core"
    if loop_delay > LATE:
        return f"its event loop was often more than {loop_delay * 1e3:.0f} ms late{waits}"
    return None
