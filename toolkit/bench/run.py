"""One run of `tk bench`: find the model, warm up, measure, report."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from toolkit.bench.arrivals import arrival_times
from toolkit.bench.client import ROUTES, Client, clock_from_now, first_model, open_session
from toolkit.bench.dataset import WARMUPS, RandomDataset
from toolkit.bench.load import closed_loop, open_loop, watch_loop_delay
from toolkit.bench.progress import show_progress
from toolkit.bench.record import RequestRecord
from toolkit.bench.report import as_json, print_table
from toolkit.bench.stats import Result, evaluate
from toolkit.bench.wire import ServerError
from toolkit.config.clients import BenchConfig
from toolkit.errors import ConfigError

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
        check_writable(Path(config.save_result))  # now, not after ten minutes of load
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
    async with open_session(config.api_key) as session:
        model = config.model or await first_model(session, config.url)
        dataset = RandomDataset(config, model)
        if config.num_warmups:
            await warm_up(session, config, dataset)
        print(f"Loading {config.url} ({model}) ...", file=sys.stderr)
        return await load(session, config, dataset)


async def warm_up(session: aiohttp.ClientSession, config: BenchConfig, dataset: RandomDataset) -> None:
    """Sends the warm-up requests, a few at a time, and waits for their answers."""
    client = Client(session, config.url + ROUTES[config.endpoint], clock=clock_from_now())
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


async def load(session: aiohttp.ClientSession, config: BenchConfig, dataset: RandomDataset) -> Outcome:
    """The measured part."""
    records: list[RequestRecord] = []
    requests = []
    if open_ended := not config.paced and config.max_concurrency is not None:
        schedule = None
    else:
        schedule = arrival_times(
            config.request_rate, count=config.count, duration=config.duration, seed=config.seed
        )
        records = [RequestRecord(scheduled=float(seconds)) for seconds in schedule]
        requests = [dataset.request(number) for number in range(len(records))]
    gc.collect()
    gc.freeze()  # what exists now stays: a collection during the run need not look at it

    client = Client(session, config.url + ROUTES[config.endpoint], clock=clock_from_now())
    cpu = time.process_time()
    delays = array("d")
    if open_ended:
        assert config.max_concurrency is not None
        driver = closed_loop(
            client,
            dataset.request,
            records,
            config.max_concurrency,
            count=config.count,
            duration=config.duration,
        )
    else:
        driver = open_loop(client, requests, records, config.max_concurrency)
    watchers = [
        asyncio.create_task(watch_loop_delay(client.clock, delays)),
        asyncio.create_task(show_progress(client, config)),
    ]
    interrupted = await until_done_or_interrupted(asyncio.create_task(driver))
    cpu_share = (time.process_time() - cpu) / max(client.clock(), 1e-9)
    gc.unfreeze()
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    result = evaluate(records, loop_delays=delays, cpu_share=cpu_share, paced=config.paced)
    return Outcome(dataset.model, result, interrupted)


async def until_done_or_interrupted(task: asyncio.Task[None]) -> bool:
    """Waits for the task. The first Ctrl-C cancels it and makes this return True."""
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    with suppress(NotImplementedError, ValueError):  # not on Windows, not outside the main thread
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        with suppress(NotImplementedError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)
    return interrupted


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def raise_file_limit() -> None:
    """Every request in flight is an open file."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_writable(path: Path) -> None:
    """Raises ConfigError when nothing can be written there."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"--save-result cannot write {path}: {error.strerror}.", param="save_result"
        ) from None
