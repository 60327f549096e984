"""One client's share of the load: with n clients, number i has requests i, i + n, i + 2n, …"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from array import array
from contextlib import suppress

import msgspec

from toolkit.bench.load.arrivals import Times, schedule
from toolkit.bench.load.client import Client, Clock
from toolkit.bench.load.dataset import BenchRequest, Dataset, request
from toolkit.bench.load.drivers import closed_loop, open_loop, watch_loop_delay
from toolkit.bench.load.http_client import Http
from toolkit.bench.load.record import RequestRecord, Share
from toolkit.bench.load.recorded_datasets import open_dataset
from toolkit.bench.report.client_machine import usable_cores
from toolkit.config.load import BenchConfig

TOKENS_PER_CLIENT = 10_000
"""Tokens per second that one client takes without trouble: about a tenth of what would fill its core."""

PLACES_PER_CLIENT = 64
"""Requests in flight for one client, where nobody knows how many tokens they will bring."""

CORES_PER_CLIENT = 4
"""The server is often on the same machine, and needs its cores."""


MOST_READY = 10_000
"""Requests of which the bodies are made before the start; those of the others just before they are needed."""


class Job(msgspec.Struct, tag="job"):
    """What client number `index` of `clients` is to do."""

    config: BenchConfig
    model: str
    index: int = 0
    clients: int = 1


def number_of_clients(config: BenchConfig, dataset: Dataset, cores: int | None = None) -> int:
    """As many as were asked for, else as many as the load needs and the machine's cores allow."""
    if config.clients is not None:
        wanted = config.clients
    elif config.paced:
        answer = config.output_len or dataset.prompt(0).max_tokens
        wanted = math.ceil(highest_rate(config, dataset) * answer / TOKENS_PER_CLIENT)
    else:
        wanted = math.ceil((config.max_concurrency or config.count or 1) / PLACES_PER_CLIENT)
    if config.clients is None:
        wanted = max(
            1, min(wanted, (usable_cores() if cores is None else cores) // CORES_PER_CLIENT)
        )
    return min(wanted, config.count or wanted, config.max_concurrency or wanted)


def highest_rate(config: BenchConfig, dataset: Dataset) -> float:
    """Requests per second, where they arrive by a clock."""
    if config.replayed:
        assert dataset.times is not None, "what is replayed has times"
        return len(dataset.times) / max(float(dataset.times[-1]), 1e-3)
    if config.ramp_up_strategy is None:
        return config.request_rate
    return max(config.ramp_up_start_rps or 0.0, config.ramp_up_end_rps or 0.0)


def planned(config: BenchConfig, dataset: Dataset) -> Times | None:
    """When requests arrive, in seconds; None when each answer starts the next request."""
    if config.replayed:
        times = dataset.times
        assert times is not None, "what is replayed has times"
        times = times[: config.count]
        return times if config.duration is None else times[times < config.duration]
    if config.paced or config.max_concurrency is None:
        assert config.seed is not None, "a run has chosen its seed"
        return schedule(config, config.seed)
    return None


class LoadShare:
    """A share that is ready to be run: what can be made before the start is made."""

    def __init__(self, job: Job, http: Http) -> None:
        self.config, self.job = job.config, job
        self._dataset = open_dataset(job.config)
        self._http = http
        self._records: list[RequestRecord] = []
        times = planned(job.config, self._dataset)
        self.follows_a_clock = times is not None
        if times is not None:
            self._records = [
                RequestRecord(self._number(i), scheduled=float(seconds))
                for i, seconds in enumerate(times[job.index :: job.clients])
            ]
        num_ready = len(self._records) if self.follows_a_clock else self._count or 0
        self._ready = [self._make(i) for i in range(min(num_ready, MOST_READY))]
        self.client: Client | None = None
        gc.collect()
        gc.freeze()  # what exists now stays: a collection during the run need not look at it

    def _request(self, i: int) -> BenchRequest:
        return self._ready[i] if i < len(self._ready) else self._make(i)

    def _make(self, i: int) -> BenchRequest:
        return request(self._dataset.prompt(self._number(i)), self.config, self.job.model)

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
        self.client = Client(self._http, self.config.route, clock)
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
        if not self.follows_a_clock:
            for record in self._records:
                record.number = self._number(record.number)
        return Share(self._records, delays, cpu_share)

    async def _drive(self) -> None:
        assert self.client is not None
        if self.follows_a_clock:
            await open_loop(self.client, self._request, self._records, self._places)
            return
        places = self._places
        assert places is not None
        await closed_loop(
            self.client,
            self._request,
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
