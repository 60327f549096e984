"""One client's share of the load: of n clients, client i sends requests i, i + n, i + 2n, …"""

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
from toolkit.bench.load.http_client import HTTPClient
from toolkit.bench.load.record import ClientResult, RequestRecord
from toolkit.bench.load.recorded_datasets import open_dataset
from toolkit.bench.report.client_machine import usable_cores
from toolkit.config.load import BenchConfig

TOKENS_PER_CLIENT = 10_000
"""Tokens per second that one client handles easily: about a tenth of what fills its core."""

CONCURRENCY_PER_CLIENT = 64  # requests in flight per client when the token rate is unknown

CORES_PER_CLIENT = 4
"""Cores per client. The server is often on the same machine and needs the others."""

MAX_PREPARED = 10_000
"""Requests whose bodies are built before the start. The others are built when needed."""

MAX_PREPARED_FILES = 256  # of a megabyte


class LoadJob(msgspec.Struct, tag="job"):
    """Job of client `index` of `clients`."""

    config: BenchConfig
    model: str
    asks_counts: bool = False  # events may have several tokens, and shall say how many
    index: int = 0
    clients: int = 1


def choose_num_clients(config: BenchConfig, dataset: Dataset, cores: int | None = None) -> int:
    """Return `clients` if set, else as many as the load needs and the machine's cores allow."""
    if config.clients is not None:
        count = config.clients
    else:
        if config.is_paced:
            output_len = config.output_len or dataset.prompt(0).max_tokens
            count = math.ceil(peak_rate(config, dataset) * output_len / TOKENS_PER_CLIENT)
        else:
            concurrency = config.max_concurrency or config.max_requests or 1
            count = math.ceil(concurrency / CONCURRENCY_PER_CLIENT)
        num_cores = usable_cores() if cores is None else cores
        count = max(1, min(count, num_cores // CORES_PER_CLIENT))
    return min(count, config.max_requests or count, config.max_concurrency or count)


def peak_rate(config: BenchConfig, dataset: Dataset) -> float:
    """Return the highest rate of a schedule, in requests per second."""
    if config.is_replayed:
        assert dataset.times is not None, "a trace has times"
        return len(dataset.times) / max(float(dataset.times[-1]), 1e-3)
    if config.ramp_up_strategy is None:
        return config.request_rate
    return max(config.ramp_up_start_rps or 0.0, config.ramp_up_end_rps or 0.0)


def arrival_times(config: BenchConfig, dataset: Dataset) -> Times | None:
    """Return the scheduled arrivals in seconds, or None if each answer starts the next request."""
    if config.is_replayed:
        times = dataset.times
        assert times is not None, "a trace has times"
        times = times[: config.max_requests]
        return times if config.duration is None else times[times < config.duration]
    if config.is_paced or config.max_concurrency is None:
        assert config.seed is not None, "a run has chosen its seed"
        return schedule(config, config.seed)
    return None


class LoadShare:
    """One client's share. The constructor prepares all that can be done before the start."""

    def __init__(self, job: LoadJob, http: HTTPClient) -> None:
        self.config, self.job = job.config, job
        self._dataset = open_dataset(job.config)
        self._http = http
        self._records: list[RequestRecord] = []
        times = arrival_times(job.config, self._dataset)
        self.is_scheduled = times is not None
        if times is not None:
            self._records = [
                RequestRecord(self._global_number(i), scheduled=float(seconds))
                for i, seconds in enumerate(times[job.index :: job.clients])
            ]
        num_prepared = len(self._records) if self.is_scheduled else self._max_requests or 0
        most = MAX_PREPARED_FILES if job.config.is_sound else MAX_PREPARED
        self._prepared = [self._build_request(i) for i in range(min(num_prepared, most))]
        self.client: Client | None = None
        gc.collect()
        gc.freeze()  # spare collections during the run the objects that exist now

    def _request(self, i: int) -> BenchRequest:
        return self._prepared[i] if i < len(self._prepared) else self._build_request(i)

    def _build_request(self, i: int) -> BenchRequest:
        prompt = self._dataset.prompt(self._global_number(i))
        return request(prompt, self.config, self.job.model, asks_counts=self.job.asks_counts)

    @property
    def _max_requests(self) -> int | None:
        return self._share_of(self.config.max_requests)

    @property
    def _max_concurrency(self) -> int | None:
        return self._share_of(self.config.max_concurrency)

    def _share_of(self, total: int | None) -> int | None:
        return None if total is None else len(range(self.job.index, total, self.job.clients))

    def _global_number(self, i: int) -> int:
        """Return the number of this share's request i among the requests of all clients."""
        return self.job.index + i * self.job.clients

    def start(self, clock: Clock) -> Client:
        """Create the client that `run` uses."""
        self.client = Client(self._http, self.config.route, clock)
        return self.client

    async def run(self, stop: asyncio.Event) -> ClientResult:
        """Send the share's requests and wait for their answers, or until `stop`."""
        assert self.client is not None
        clock = self.client.clock
        delays = array("d")
        await asyncio.sleep(-clock())  # the clock is negative before the start
        cpu, start = time.process_time(), clock()
        watcher = asyncio.create_task(watch_loop_delay(clock, delays))
        await run_until(stop, asyncio.create_task(self._drive()))
        cpu_share = (time.process_time() - cpu) / max(clock() - start, 1e-9)
        gc.unfreeze()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        if not self.is_scheduled:
            for record in self._records:
                record.number = self._global_number(record.number)
        return ClientResult(self._records, delays, cpu_share)

    async def _drive(self) -> None:
        assert self.client is not None
        if self.is_scheduled:
            await open_loop(self.client, self._request, self._records, self._max_concurrency)
            return
        concurrency = self._max_concurrency
        assert concurrency is not None
        await closed_loop(
            self.client,
            self._request,
            self._records,
            concurrency,
            count=self._max_requests,
            duration=self.config.duration,
        )


async def run_until(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not task.done():
            task.cancel()
    with suppress(asyncio.CancelledError):
        await task
