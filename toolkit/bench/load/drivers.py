"""Open-loop and closed-loop drivers. They return when their requests have ended."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from itertools import count as count_up

from toolkit.bench.load.client import Client
from toolkit.bench.load.dataset import BenchRequest
from toolkit.bench.load.record import RequestRecord

TIMER_RESOLUTION = 0.001  # seconds
SAMPLE_INTERVAL = 0.01  # seconds between samples of the event loop's delay


async def open_loop(
    client: Client,
    request: Callable[[int], BenchRequest],
    records: list[RequestRecord],
    max_concurrency: int | None,
) -> None:
    """Start request i at `records[i].scheduled`, whether or not earlier ones have ended.

    With `max_concurrency` a request may have to wait. Its latencies still count from the schedule.
    """
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None

    async def send(body: BenchRequest, record: RequestRecord) -> None:
        record.started = client.clock()
        if slots is None:
            await client.send(body, record)
            return
        async with slots:
            await client.send(body, record)

    async with asyncio.TaskGroup() as tasks:
        for number, record in enumerate(records):
            body = request(number)
            await sleep_until(record.scheduled, client.clock)
            tasks.create_task(send(body, record))


async def closed_loop(
    client: Client,
    request: Callable[[int], BenchRequest],
    records: list[RequestRecord],
    concurrency: int,
    *,
    count: int | None,
    duration: float | None,
) -> None:
    """Keep `concurrency` requests in flight until `count` are sent or `duration` seconds are over.

    Appends a record for each request. A request is scheduled when an earlier one ends."""
    numbers = count_up()

    async def send_repeatedly() -> None:
        for number in numbers:
            if count is not None and number >= count:
                return
            body = request(number)
            now = client.clock()
            if duration is not None and now >= duration:
                return
            record = RequestRecord(number, scheduled=now, started=now)
            records.append(record)
            await client.send(body, record)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency if count is None else min(concurrency, count)):
            tasks.create_task(send_repeatedly())


async def sleep_until(due: float, clock: Callable[[], float]) -> None:
    """Sleep until `clock` reads `due`.

    Timers are half a millisecond off, so the last millisecond of a long wait polls the clock.
    A client that is behind still yields once, so that other tasks send and Ctrl-C is handled."""
    wait = due - clock()
    if wait > 5 * TIMER_RESOLUTION:
        await asyncio.sleep(wait - TIMER_RESOLUTION)
        while clock() < due:
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(max(wait, 0.0))
        while (wait := due - clock()) > 0:
            await asyncio.sleep(wait)


async def watch_loop_delay(clock: Callable[[], float], delays: array[float]) -> None:
    """Append the event loop's delay in seconds every 10 ms until cancelled."""
    while True:
        due = clock() + SAMPLE_INTERVAL
        await asyncio.sleep(SAMPLE_INTERVAL)
        delays.append(max(0.0, clock() - due))
