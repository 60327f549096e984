"""tk bench: the load generator, what is made of its results, and the engine benchmarks."""

from __future__ import annotations

import typer

from toolkit.cli.command import command, command_with_subcommands
from toolkit.cli.root import app
from toolkit.config import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from toolkit.config.bench import BenchCacheConfig, LatencyConfig, OfflineConfig, PrefillConfig
from toolkit.config.load import BenchConfig, CompareConfig, SweepConfig

ENGINE = (ModelConfig, DeviceConfig, BenchCacheConfig, SchedulerConfig, ParallelConfig)


@command_with_subcommands(app, "bench", BenchConfig)
def bench(config: BenchConfig) -> None:
    """Load a running OpenAI-compatible server: latency and throughput.

    Requests are sent on a schedule that no slow answer shifts. Latencies count from the scheduled arrival, so that what
    a request waits for before it is sent is part of them, and, told apart, from the moment of sending.

    With a command from the list at the end: several runs, what changed between two, or the engine alone.
    """
    _load(config)


@command(bench, "serve", BenchConfig)
def serve(config: BenchConfig) -> None:
    """The same as tk bench, under the name that it has in vLLM."""
    _load(config)


def _load(config: BenchConfig) -> None:
    if config.find_max_rps:
        from toolkit.bench.search import run_search

        raise typer.Exit(run_search(config))
    from toolkit.bench.run import run

    raise typer.Exit(run(config))


@command(bench, "sweep", SweepConfig)
def sweep(config: SweepConfig) -> None:
    """Several runs, over values of one flag or more: a line for each.

    tk bench sweep --vary rps=1,2,4,8 random-input-len=128,1024 makes eight.
    """
    from toolkit.bench.sweep import run_sweep

    raise typer.Exit(run_sweep(config))


@command(bench, "compare", CompareConfig)
def compare(config: CompareConfig) -> None:
    """What changed between two saved results; 1 after a regression.

    A change is one when chance would make it once in a hundred times, by the results' own intervals of confidence. These
    know that requests of one time resemble each other, but not that a machine is slower on some days: repeat close calls.
    """
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
    """Many requests of mixed lengths at once: the engine's throughput.

    The answers run to their full lengths. With --load-format dummy the model needs no weights.
    """
    from toolkit.bench.engine import run_offline

    run_offline(
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
    """Equal requests, a few at once: milliseconds per token."""
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
    """Long prompts, answers of one token: how fast prompts are read."""
    from toolkit.bench.engine import run_prefill

    run_prefill(
        EngineConfig(
            model=model, device=device, cache=cache, scheduler=scheduler, parallel=parallel
        ),
        config,
    )
