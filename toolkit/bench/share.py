"""One client's share of the load: with n clients, number i has requests i, i + n, i + 2n, …"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from array import array
from contextlib import suppress

import msgspec

from toolkit.bench.arrivals import arrival_times
from toolkit.bench.client import ROUTES, Client, Clock
from toolkit.bench.dataset import RandomDataset
from toolkit.bench.http import Http
from toolkit.bench.load import closed_loop, open_loop, watch_loop_delay
from toolkit.bench.record import RequestRecord, Share
from toolkit.config.clients import BenchConfig

TOKENS_PER_CLIENT = 10_000
"""Tokens per second that one client takes without trouble: about a tenth of what would fill its core."""

PLACES_PER_CLIENT = 64
"""Requests in flight for one client, where nobody knows how many tokens they will bring."""

CORES_PER_CLIENT = 4
"""The server is often on the same machine, and needs its cores."""


class Job(msgspec.Struct, tag="job"):
    """What client number `index` of `clients` is to do."""

    config: BenchConfig
    model: str
    index: int = 0
    clients: int = 1


def number_of_clients(config: BenchConfig, cores: int | None = None) -> int:
    """As many as were asked for, else as many as the load needs and the machine's cores allow."""
    if config.clients is not None:
        wanted = config.clients
    elif config.paced:
        wanted = math.ceil(config.request_rate * config.random_output_len / TOKENS_PER_CLIENT)
    else:
        wanted = math.ceil((config.max_concurrency or config.count or 1) / PLACES_PER_CLIENT)
    if config.clients is None:
        wanted = min(wanted, max(1, (_cores() if cores is None else cores) // CORES_PER_CLIENT))
    return min(wanted, config.count or wanted, config.max_concurrency or wanted)


class LoadShare:
    """A share that is ready to be run: what can be made before the start is made."""

    def __init__(self, job: Job, http: Http) -> None:
        self.config, self.job = job.config, job
        self._dataset = RandomDataset(job.config, job.model)
        self._http = http
        self._records: list[RequestRecord] = []
        self.follows_a_clock = job.config.paced or job.config.max_concurrency is None
        if self.follows_a_clock:
            schedule = arrival_times(
                job.config.request_rate,
                count=job.config.count,
                duration=job.config.duration,
                seed=job.config.seed,
            )
            mine = schedule[job.index :: job.clients]
            self._records = [RequestRecord(scheduled=float(seconds)) for seconds in mine]
        num_ready = len(self._records) if self.follows_a_clock else (self._count or 0)
        self._ready = [self._dataset.request(self._number(i)) for i in range(num_ready)]
        self.client: Client | None = None
        gc.collect()
        gc.freeze()  # what exists now stays: a collection during the run need not look at it

    @property
    def _count(self) -> int | None:
        """Most requests of this share."""
        count = self.config.count
        return None if count is None else len(range(self.job.index, count, self.job.clients))

    @property
    def _places(self) -> int | None:
        """Most requests of this share in flight."""
        places = self.config.max_concurrency
        return None if places is None else len(range(self.job.index, places, self.job.clients))

    def _number(self, i: int) -> int:
        """The number, among all clients' requests, of this share's request i."""
        return self.job.index + i * self.job.clients

    def start(self, clock: Clock) -> Client:
        """The client that `run` will use."""
        self.client = Client(self._http, ROUTES[self.config.endpoint], clock)
        return self.client

    async def run(self, stop: asyncio.Event) -> Share:
        """Sends the share's requests and waits for their answers, or until `stop`."""
        assert self.client is not None
        clock = self.client.clock
        delays = array("d")
        await asyncio.sleep(-clock())  # not at all when it has begun already
        cpu, began = time.process_time(), clock()
        watcher = asyncio.create_task(watch_loop_delay(clock, delays))
        await run_until(stop, asyncio.create_task(self._drive()))
        cpu_share = (time.process_time() - cpu) / max(clock() - began, 1e-9)
        gc.unfreeze()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        return Share(self._records, delays, cpu_share)

    async def _drive(self) -> None:
        assert self.client is not None
        if self.follows_a_clock:
            await open_loop(self.client, self._ready, self._records, self._places)
            return
        places, ready = self._places, self._ready
        assert places is not None
        await closed_loop(
            self.client,
            lambda i: ready[i] if i < len(ready) else self._dataset.request(self._number(i)),
            self._records,
            places,
            count=self._count,
            duration=self.config.duration,
        )


async def run_until(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Waits for the task, which `stop` cancels."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not task.done():
            task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
