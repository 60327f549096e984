"""Who sends when, against servers that are not there."""

from __future__ import annotations

import pytest

from toolkit.bench.load.client import Clock, wait_until_ready
from toolkit.bench.load.dataset import BenchRequest
from toolkit.bench.load.drivers import open_loop
from toolkit.bench.load.record import RequestRecord


@pytest.mark.parametrize("attempts", [1, 3])
async def test_a_proxy_that_answers_for_a_server_that_starts_is_not_the_server(attempts):
    class Proxy:
        asked = 0

        async def get(self, path, timeout):
            self.asked += 1
            return (200 if self.asked == attempts else 503), b""

    await wait_until_ready(proxy := Proxy(), "http://proxy", 30.0)
    assert proxy.asked == attempts


async def test_a_client_that_is_behind_sends_what_it_has():
    """Also where making a request takes longer than the time until the next."""
    events = []

    class Server:
        clock = Clock(0.0)  # long ago: everything is due

        async def send(self, body, record):
            events.append(f"sent {record.number}")

    def make(number):
        events.append(f"made {number}")
        return BenchRequest(b"", 1)

    await open_loop(
        Server(), make, [RequestRecord(number, scheduled=0.0) for number in range(4)], None
    )
    assert events.index("sent 0") < events.index("made 2")
