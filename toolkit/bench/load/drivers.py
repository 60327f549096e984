"""Who sends when. Both drivers run until their requests have ended, and can be cancelled at any moment."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from itertools import count as count_up

from toolkit.bench.load.client import Client
from toolkit.bench.load.dataset import BenchRequest
from toolkit.bench.load.record import RequestRecord

TIMER_RESOLUTION = 0.001  # seconds
TICK = 0.01  # seconds between two looks at how late the event loop is


async def open_loop(
    client: Client,
    request: Callable[[int], BenchRequest],
    records: list[RequestRecord],
    max_concurrency: int | None,
) -> None:
    """Starts request i at `records[i].scheduled`, whatever became of those before it.

    With `max_concurrency` a request that finds no free place waits for one; it is still late by its schedule.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None

    async def one(body: BenchRequest, record: RequestRecord) -> None:
        record.woken = client.clock()
        if places is None:
            await client.send(body, record)
            return
        async with places:
            await client.send(body, record)

    async with asyncio.TaskGroup() as tasks:
        for number, record in enumerate(records):
            body = request(number)
            await sleep_until(record.scheduled, client.clock)
            tasks.create_task(one(body, record))


async def closed_loop(
    client: Client,
    request: Callable[[int], BenchRequest],
    records: list[RequestRecord],
    concurrency: int,
    *,
    count: int | None,
    duration: float | None,
) -> None:
    """Keeps `concurrency` requests in flight until `count` are sent or `duration` seconds are over.

    Appends a record for each request; it counts as scheduled when its place became free.
    """
    numbers = count_up()

    async def place() -> None:
        for number in numbers:
            if count is not None and number >= count:
                return
            body = request(number)
            now = client.clock()
            if duration is not None and now >= duration:
                return
            record = RequestRecord(number, scheduled=now, woken=now)
            records.append(record)
            await client.send(body, record)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency if count is None else min(concurrency, count)):
            tasks.create_task(place())


async def sleep_until(due: float, clock: Callable[[], float]) -> None:
    """Sleeps until `clock` reads `due`.

    Timers are half a millisecond off; where there is time for it, the last one is spent looking at the clock. Where
    there is none at all, others run once nevertheless: a client that is behind still sends what it has, and hears Ctrl-C.
    """
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
    """Writes down, every 10 ms, how many seconds late the event loop is. Runs until cancelled."""
    while True:
        due = clock() + TICK
        await asyncio.sleep(TICK)
        delays.append(max(0.0, clock() - due))
