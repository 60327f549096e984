"""One run of `tk bench`: find the model, warm up, measure, report."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import orjson

from toolkit.bench.load.client import Client, Clock, first_model, wait_until_ready
from toolkit.bench.load.dataset import WARMUP, Dataset, RandomDataset, request
from toolkit.bench.load.drivers import closed_loop
from toolkit.bench.load.event_loop import event_loop_factory, raise_file_limit
from toolkit.bench.load.http_client import Http
from toolkit.bench.load.processes import ClientProcesses
from toolkit.bench.load.record import RequestRecord, Share
from toolkit.bench.load.recorded_datasets import open_dataset
from toolkit.bench.load.share import Job, LoadShare, number_of_clients
from toolkit.bench.progress import showing_progress
from toolkit.bench.report.document import as_json, request_lines
from toolkit.bench.report.files import ResultFiles
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.stats import evaluate
from toolkit.bench.server_metrics import ServerChange, read_metrics
from toolkit.client.wire import RequestFailedError, ServerError
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError

T = TypeVar("T")

WARMUP_CONCURRENCY = 16


def run(config: BenchConfig) -> int:
    """Measures and reports; the exit code of the command."""
    files: list[ResultFiles] = []

    def prepare(model: str, began: datetime.datetime) -> None:
        if config.saves:  # now, not after ten minutes of load
            files.append(ResultFiles.of(config, model, began))
        print(f"Loading {config.url} ({model}) ...", file=sys.stderr)

    outcome = run_loop(lambda: measure(config, prepare))
    document = as_json(outcome)
    try:
        for one in files:
            save(one, outcome, document)
            print(f"Saved {one.json}, {one.jsonl.name}, {one.html.name}", file=sys.stderr)
    finally:  # a full disk takes no more than the files
        report(outcome, document)
    return outcome.exit_code


def report(outcome: Outcome, document: dict[str, Any]) -> None:
    """Prints the result."""
    if outcome.config.json:
        print(to_text(document), end="")
        if outcome.result.saturated is not None:
            print(f"CLIENT SATURATED: {outcome.result.saturated}.", file=sys.stderr)
    else:
        from rich.console import Console

        from toolkit.bench.report.table import print_table

        print_table(Console(highlight=False), outcome)


def run_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine as every client does."""
    raise_file_limit()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(main())


def to_text(document: object) -> str:
    """JSON that people can read, too."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def save(files: ResultFiles, outcome: Outcome, document: dict[str, Any]) -> None:
    """Writes the result, the requests and the report with plots."""
    from toolkit.bench.report.html import html_report

    try:
        files.json.write_text(to_text(document))
        files.jsonl.write_bytes(b"".join(request_lines(outcome)))
        files.html.write_text(html_report(outcome))
    except OSError as error:
        raise ConfigError(
            f"The result cannot be saved in {files.json.parent}: {error.strerror}."
        ) from None


def seed_of_run(seed: int | None, number: int) -> int | None:
    """The seed of one of several runs: with the same one in all of them, the second would find its prompts in the
    server's prefix cache.
    """
    return None if seed is None else seed + number


def save_numbered(outcome: Outcome, number: int) -> None:
    """Saves one of several runs, where its config says so; under a given name with a number behind it."""
    config = outcome.config
    if not config.saves:
        return
    if config.result_filename is not None:
        name = f"{config.result_filename.removesuffix('.json')}-{number}"
        config = dataclasses.replace(config, result_filename=name)
    save(ResultFiles.of(config, outcome.model, outcome.began), outcome, as_json(outcome))


async def measure(
    config: BenchConfig,
    prepare: Callable[[str, datetime.datetime], None] = lambda model, began: None,
) -> Outcome:
    """Loads the server as configured. Ctrl-C ends the load, not the measurement. `prepare` is called before it with the
    model's name and the time.

    Raises ServerError when there is no server, it lists no model, or no warm-up request succeeds; ConfigError for a
    dataset that cannot be read.
    """
    config, dataset = settle(config)
    async with Http(config.url, config.api_key, config.header) as http:
        await wait_until_ready(http, config.url, config.ready_check_timeout_sec)
        model = config.model or await first_model(http, config.url)
        began = datetime.datetime.now(datetime.UTC)
        prepare(model, began)
        await warm_up(http, config, model)
        clients = number_of_clients(config, dataset)
        before, version = await read_metrics(http), await server_version(http)
        stop = asyncio.Event()
        with on_interrupt(stop.set):
            if clients == 1:
                shares = [await load_from_here(http, config, model, stop)]
            else:
                shares = await load_from_processes(config, model, clients, stop)
            after = (
                await read_metrics(http) if before is not None else None
            )  # a second Ctrl-C loses nothing
    return Outcome(
        config=config,
        model=model,
        result=evaluate(
            shares,
            paced=config.paced,
            percentiles=config.percentiles,
            objectives=config.objectives,
            settles=config.ramp_up_strategy is None,
        ),
        records=[record for share in shares for record in share.records],
        interrupted=stop.is_set(),
        server=None if before is None or after is None else ServerChange(before, after),
        server_version=version,
        began=began,
    )


def settle(config: BenchConfig) -> tuple[BenchConfig, Dataset]:
    """The config with what it leaves open, the seed and the length of a trace, and its dataset."""
    if config.seed is None:
        config = dataclasses.replace(config, seed=secrets.randbits(32))
    dataset = open_dataset(config)
    if dataset.times is not None and config.count is None and config.duration is None:
        config = dataclasses.replace(config, num_prompts=len(dataset.times))
    return config, dataset


async def server_version(http: Http) -> str | None:
    """What /version says, where there is one."""
    try:
        status, body = await http.get("/version", timeout=5.0)
        return str(orjson.loads(body)["version"]) if status == 200 else None
    except (RequestFailedError, ValueError, LookupError, TypeError):
        return None


async def warm_up(http: Http, config: BenchConfig, model: str) -> None:
    """Sends the warm-up requests, a few at a time, and waits for their answers. They are made, and share no prompt with
    the measured ones.
    """
    if not config.num_warmups:
        return
    client, dataset = Client(http, config.route, Clock()), RandomDataset(config, WARMUP)
    records: list[RequestRecord] = []
    await closed_loop(
        client,
        lambda number: request(dataset.prompt(number), config, model),
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
