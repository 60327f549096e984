"""`tk bench`: load tests of servers, comparisons of results, and engine benchmarks."""

import dataclasses
from typing import TypeVar

import typer

from toolkit.cli.command import command, command_with_subcommands
from toolkit.cli.root import app
from toolkit.config import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from toolkit.config.bench import (
    BenchCacheConfig,
    LatencyConfig,
    OfflineConfig,
    PrefillConfig,
    ThroughputConfig,
)
from toolkit.config.clients import DEFAULT_URL
from toolkit.config.load import BenchConfig, CompareConfig, SweepConfig

LoadConfig = TypeVar("LoadConfig", bound=BenchConfig)

ENGINE = (ModelConfig, DeviceConfig, BenchCacheConfig, SchedulerConfig, ParallelConfig)


@command_with_subcommands(app, "bench", BenchConfig)
def bench(config: BenchConfig) -> None:
    """Measure latency and throughput of a running server.

    The server must be OpenAI-compatible. Requests are sent on a fixed schedule, which slow answers
    do not delay. Latencies count from the scheduled arrival, so they include the time until a
    request is sent; the latencies from sending are reported separately.

    The subcommands make several runs, compare two results, or measure the engine without a server.
    """
    _load(config)


@command(bench, "serve", BenchConfig)
def serve(config: BenchConfig) -> None:
    """Do the same as tk bench; this is its name in vLLM."""
    _load(config)


def _load(config: BenchConfig) -> None:
    config = with_url(config)
    if config.find_max_rps:
        from toolkit.bench.search import run_search

        raise typer.Exit(run_search(config))
    from toolkit.bench.run import run

    raise typer.Exit(run(config))


def with_url(config: LoadConfig) -> LoadConfig:
    """Return the config with the address of a running server, if it has none."""
    if config.url:
        return config
    from toolkit.client.choice import choose_server

    server = choose_server(config.model)
    return dataclasses.replace(config, url=server.url if server is not None else DEFAULT_URL)


@command(bench, "sweep", SweepConfig)
def sweep(config: SweepConfig) -> None:
    """Make one run for each combination of flag values.

    tk bench sweep --vary rps=1,2,4,8 random-input-len=128,1024 makes eight runs, and prints a line
    for each."""
    from toolkit.bench.sweep import run_sweep

    raise typer.Exit(run_sweep(with_url(config)))


@command(bench, "compare", CompareConfig)
def compare(config: CompareConfig) -> None:
    """Compare two saved results; exit with 1 after a regression.

    A change counts if its probability under chance is below 1 %, by the confidence intervals of the
    results. These allow for the correlation of requests that run at the same time, but not for a
    machine that is slower on some days: repeat the measurement when the result is close."""
    from toolkit.bench.report.compare import run_compare

    raise typer.Exit(run_compare(config))


@command(bench, "offline", OfflineConfig, *ENGINE)
def offline(
    config: OfflineConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
) -> None:
    """Measure the engine's throughput on requests of mixed lengths.

    All requests are submitted at once, and answers always have their full length. With
    --load-format dummy the model needs no weights."""
    from toolkit.bench.engine import run_offline

    run_offline(
        EngineConfig(
            model=model, device=device, cache=cache, scheduler=scheduler, parallel=parallel
        ),
        config,
    )


@command(bench, "throughput", ThroughputConfig, *ENGINE)
def throughput(
    config: ThroughputConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
) -> None:
    """Measure the engine's throughput on requests of one length.

    All requests are submitted at once, and answers always have their full length. The first
    requests, as many as run at once, also run before the measurement, to warm up. A request's time
    counts from the submission of all."""
    from toolkit.bench.engine import run_throughput

    run_throughput(
        EngineConfig(
            model=model, device=device, cache=cache, scheduler=scheduler, parallel=parallel
        ),
        config,
    )


@command(bench, "latency", LatencyConfig, *ENGINE)
def latency(
    config: LatencyConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
) -> None:
    """Measure the engine's time per token on a few equal requests."""
    from toolkit.bench.engine import run_latency

    run_latency(
        EngineConfig(
            model=model, device=device, cache=cache, scheduler=scheduler, parallel=parallel
        ),
        config,
    )


@command(bench, "prefill", PrefillConfig, *ENGINE)
def prefill(
    config: PrefillConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
) -> None:
    """Measure the engine's throughput on long prompts.

    Answers have one token."""
    from toolkit.bench.engine import run_prefill

    run_prefill(
        EngineConfig(
            model=model, device=device, cache=cache, scheduler=scheduler, parallel=parallel
        ),
        config,
    )
