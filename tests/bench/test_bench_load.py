"""Waiting for a server, and the open loop, with fake servers."""

from __future__ import annotations

import pytest

from toolkit.bench.load.client import Clock, wait_until_ready
from toolkit.bench.load.dataset import BenchRequest
from toolkit.bench.load.drivers import open_loop
from toolkit.bench.load.record import RequestRecord


@pytest.mark.parametrize("attempts", [1, 3])
async def test_proxy_error_does_not_count_as_ready(attempts):
    class Proxy:
        asked = 0

        async def get(self, path, timeout):
            self.asked += 1
            return (200 if self.asked == attempts else 503), b""

    await wait_until_ready(proxy := Proxy(), "http://proxy", 30.0)
    assert proxy.asked == attempts


async def test_late_client_keeps_sending():
    """Requests are sent even if building one takes longer than the time until the next."""
    events = []

    class Server:
        clock = Clock(0.0)  # in the past: everything is due

        async def send(self, body, record):
            events.append(f"sent {record.number}")

    def build(number):
        events.append(f"built {number}")
        return BenchRequest(b"", 1)

    await open_loop(
        Server(), build, [RequestRecord(number, scheduled=0.0) for number in range(4)], None
    )
    assert events.index("sent 0") < events.index("built 2")
