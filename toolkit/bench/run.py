"""One run of `tk bench`: find the model, warm up, measure, report."""

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
from toolkit.bench.load.dataset import WARMUP, Dataset, generated_dataset, request
from toolkit.bench.load.drivers import closed_loop
from toolkit.bench.load.event_loop import event_loop_factory, raise_file_limit
from toolkit.bench.load.http_client import HTTPClient, client_of
from toolkit.bench.load.processes import ClientProcesses
from toolkit.bench.load.record import ClientResult, RequestRecord
from toolkit.bench.load.recorded_datasets import open_dataset
from toolkit.bench.load.share import LoadJob, LoadShare, choose_num_clients
from toolkit.bench.progress import showing_progress
from toolkit.bench.report.document import as_json, request_lines
from toolkit.bench.report.files import ResultFiles
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.stats import evaluate
from toolkit.bench.server_metrics import ServerChange, has_drafts, read_metrics
from toolkit.client.wire import RequestFailedError, ServerError
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError
from toolkit.logs import escape_json, escape_line

T = TypeVar("T")

WARMUP_CONCURRENCY = 16


def run(config: BenchConfig) -> int:
    """Measure and report. Returns the exit code of the command."""
    files: list[ResultFiles] = []

    def prepare(model: str, began: datetime.datetime) -> None:
        if config.saves_files:  # fail before the load, not after it
            files.append(ResultFiles.create(config, model, began))
        print(escape_line(f"Loading {config.url} ({model}) ..."), file=sys.stderr)

    outcome = run_loop(lambda: measure(config, prepare))
    document = as_json(outcome)
    try:
        for one in files:
            save(one, outcome, document)
            print(f"Saved {one.json}, {one.jsonl.name}, {one.html.name}", file=sys.stderr)
    finally:  # a full disk must not lose the result
        report(outcome, document)
    return outcome.exit_code


def report(outcome: Outcome, document: dict[str, Any]) -> None:
    if outcome.config.json:
        print(to_json_text(document), end="")
        if outcome.result.saturated is not None:
            print(f"CLIENT SATURATED: {outcome.result.saturated}.", file=sys.stderr)
    else:
        from toolkit.bench.report.table import print_table
        from toolkit.console import SafeConsole

        print_table(SafeConsole(), outcome)


def run_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in the event loop that clients use."""
    raise_file_limit()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(main())


def to_json_text(document: object) -> str:
    """Return indented JSON."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return escape_json(orjson.dumps(document, option=options).decode())


def save(files: ResultFiles, outcome: Outcome, document: dict[str, Any]) -> None:
    """Write the result, the requests and the report with plots."""
    from toolkit.bench.report.html import html_report

    try:
        files.json.write_text(to_json_text(document))
        files.jsonl.write_bytes(b"".join(request_lines(outcome)))
        files.html.write_text(html_report(outcome))
    except OSError as error:
        raise ConfigError(
            f"The result cannot be saved in {files.json.parent}: {error.strerror}."
        ) from None


def run_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of run `number`. Equal seeds would find their prompts in the prefix cache."""
    return None if seed is None else seed + number


def save_numbered(outcome: Outcome, number: int) -> None:
    """Save one of several runs if configured. A given file name gets the number as suffix."""
    config = outcome.config
    if not config.saves_files:
        return
    if config.result_filename is not None:
        name = f"{config.result_filename.removesuffix('.json')}-{number}"
        config = dataclasses.replace(config, result_filename=name)
    save(ResultFiles.create(config, outcome.model, outcome.began), outcome, as_json(outcome))


async def measure(
    config: BenchConfig,
    prepare: Callable[[str, datetime.datetime], None] = lambda model, began: None,
) -> Outcome:
    """Load the server and return the outcome. Ctrl-C ends the load, and the result so far is kept.

    `prepare` is called before the load with the model's name and the start time. Raises ServerError
    if no server answers, it lists no model, or no warm-up request succeeds, and ConfigError if the
    dataset cannot be read."""
    config, dataset = resolve_config(config)
    async with client_of(config) as http:
        await wait_until_ready(http, config.url, config.ready_check_timeout_sec)
        model = config.model or await first_model(http, config.url)
        began = datetime.datetime.now(datetime.UTC)
        prepare(model, began)
        await warm_up(http, config, model)
        clients = choose_num_clients(config, dataset)
        before, version = await read_metrics(http), await read_version(http)
        # Drafts make events of several tokens.
        job = LoadJob(config, model, asks_counts=before is not None and has_drafts(before))
        stop = asyncio.Event()
        with on_interrupt(stop.set):
            if clients == 1:
                results = [await run_one_client(http, job, stop)]
            else:
                results = await run_client_processes(job, clients, stop)
            # Inside the block, so that a second Ctrl-C loses nothing.
            after = await read_metrics(http) if before is not None else None
    return Outcome(
        config=config,
        model=model,
        result=evaluate(
            results,
            is_paced=config.is_paced,
            percentiles=config.percentiles,
            objectives=config.objectives,
            is_steady_load=config.ramp_up_strategy is None,
        ),
        records=[record for one in results for record in one.records],
        interrupted=stop.is_set(),
        server=None if before is None or after is None else ServerChange(before, after),
        server_version=version,
        began=began,
    )


def resolve_config(config: BenchConfig) -> tuple[BenchConfig, Dataset]:
    """Fill in the seed and the length of a trace. Returns the config and its dataset."""
    if config.seed is None:
        config = dataclasses.replace(config, seed=secrets.randbits(32))
    dataset = open_dataset(config)
    if dataset.times is not None and config.max_requests is None and config.duration is None:
        config = dataclasses.replace(config, num_prompts=len(dataset.times))
    return config, dataset


async def read_version(http: HTTPClient) -> str | None:
    """Return the version from /version, or None."""
    try:
        status, body = await http.get("/version", timeout=5.0)
        return str(orjson.loads(body)["version"]) if status == 200 else None
    except (RequestFailedError, ValueError, LookupError, TypeError):
        return None


async def warm_up(http: HTTPClient, config: BenchConfig, model: str) -> None:
    """Send generated warm-up requests, which share no prompt with the measured ones."""
    if not config.num_warmups:
        return
    client, dataset = Client(http, config.route, Clock()), generated_dataset(config, WARMUP)
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
        raise ServerError(f"All {len(errors)} warm-up requests failed. {cause}: {example}")


async def run_one_client(http: HTTPClient, job: LoadJob, stop: asyncio.Event) -> ClientResult:
    """Run the load from this process."""
    share = LoadShare(job, http)
    client = share.start(Clock())
    async with showing_progress(job.config, lambda: client.counts, client.clock):
        return await share.run(stop)


async def run_client_processes(
    job: LoadJob, clients: int, stop: asyncio.Event
) -> list[ClientResult]:
    """Run the load from several client processes."""
    async with (
        ClientProcesses.started(job, clients) as processes,
        showing_progress(job.config, lambda: processes.counts, lambda: processes.clock()),
    ):
        return await processes.run(stop)


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-C call `stop` while the block runs."""
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, ValueError):  # not on Windows, not outside the main thread
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        with suppress(NotImplementedError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)
