"""One run of `tk bench`: find the model, warm up, measure, report."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from toolkit.bench.client import ROUTES, Client, Clock, Counts, first_model
from toolkit.bench.dataset import WARMUPS, RandomDataset
from toolkit.bench.event_loop import event_loop_factory, raise_file_limit
from toolkit.bench.files import check_writable
from toolkit.bench.http import Http
from toolkit.bench.load import closed_loop
from toolkit.bench.processes import ClientProcesses
from toolkit.bench.progress import show_progress
from toolkit.bench.record import RequestRecord, Share
from toolkit.bench.report import as_json, print_table
from toolkit.bench.share import Job, LoadShare, number_of_clients
from toolkit.bench.stats import Result, evaluate
from toolkit.bench.wire import ServerError
from toolkit.config.clients import BenchConfig

WARMUP_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run leaves: the model it asked for and what it measured."""

    model: str
    result: Result
    interrupted: bool

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return 130
        return 1 if self.result.saturated is not None or self.result.num_succeeded == 0 else 0


def run(config: BenchConfig) -> int:
    """Measures and prints; the exit code of the command."""
    if config.save_result is not None:
        check_writable(Path(config.save_result), "save_result")  # now, not after ten minutes of load
    raise_file_limit()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        outcome = runner.run(measure(config))
    document = as_json(config, outcome.model, outcome.result, interrupted=outcome.interrupted)
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if config.save_result is not None:
        Path(config.save_result).write_bytes(text)
        print(f"Saved to {config.save_result}", file=sys.stderr)
    if config.json:
        print(text.decode(), end="")
        if outcome.result.saturated is not None:
            print(f"CLIENT SATURATED: {outcome.result.saturated}.", file=sys.stderr)
    else:
        from rich.console import Console

        print_table(
            Console(highlight=False), config, outcome.model, outcome.result, interrupted=outcome.interrupted
        )
    return outcome.exit_code


async def measure(config: BenchConfig) -> Outcome:
    """Loads the server as configured. Ctrl-C ends the load, not the measurement.

    Raises ServerError when there is no server, it lists no model, or no warm-up request succeeds.
    """
    async with Http(config.url, config.api_key) as http:
        model = config.model or await first_model(http, config.url)
        if config.num_warmups:
            await warm_up(http, config, model)
        clients = number_of_clients(config)
        from_several = f" from {clients} processes" if clients > 1 else ""
        print(f"Loading {config.url} ({model}){from_several} ...", file=sys.stderr)
        stop = asyncio.Event()
        with on_interrupt(stop.set):
            if clients == 1:
                shares = [await load_from_here(http, config, model, stop)]
            else:
                shares = await load_from_processes(config, model, clients, stop)
    return Outcome(model, evaluate(shares, paced=config.paced), stop.is_set())


async def warm_up(http: Http, config: BenchConfig, model: str) -> None:
    """Sends the warm-up requests, a few at a time, and waits for their answers."""
    client, dataset = Client(http, ROUTES[config.endpoint], Clock()), RandomDataset(config, model)
    records: list[RequestRecord] = []
    await closed_loop(
        client,
        lambda number: dataset.request(WARMUPS + number),
        records,
        min(WARMUP_CONCURRENCY, config.max_concurrency or WARMUP_CONCURRENCY),
        count=config.num_warmups,
        duration=None,
    )
    errors = [record.error for record in records if record.error is not None]
    if len(errors) == len(records):
        cause, example = errors[0]
        raise ServerError(f"Every warm-up request failed. {cause}: {example}")


async def load_from_here(http: Http, config: BenchConfig, model: str, stop: asyncio.Event) -> Share:
    """The measured part, with one client: this process."""
    share = LoadShare(Job(config, model), http)
    client = share.start(Clock())
    async with showing_progress(config, lambda: client.counts, client.clock):
        return await share.run(stop)


async def load_from_processes(
    config: BenchConfig, model: str, clients: int, stop: asyncio.Event
) -> list[Share]:
    """The measured part, with several clients."""
    async with (
        ClientProcesses.started(config, model, clients) as processes,
        showing_progress(config, lambda: processes.counts, lambda: processes.clock()),
    ):
        return await processes.run(stop)


@asynccontextmanager
async def showing_progress(
    config: BenchConfig, counts: Callable[[], Counts], clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Draws the moving line for as long as the block runs."""
    drawing = asyncio.create_task(show_progress(config, counts, clock))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Makes Ctrl-C call `stop` for as long as the block runs."""
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, ValueError):  # not on Windows, not outside the main thread
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        with suppress(NotImplementedError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)
