"""tk bench, and the engine benchmarks below it."""

from __future__ import annotations

import typer

from toolkit.cli.command import command, command_with_subcommands
from toolkit.cli.root import app
from toolkit.config import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from toolkit.config.bench import BenchCacheConfig, LatencyConfig, OfflineConfig, PrefillConfig
from toolkit.config.clients import BenchConfig

ENGINE = (ModelConfig, DeviceConfig, BenchCacheConfig, SchedulerConfig)


@command_with_subcommands(app, "bench", BenchConfig)
def bench(config: BenchConfig) -> None:
    """Load a running server and report its latency and throughput.

    With a command from the list at the end: measure the engine alone, in this process and without a server.

    Exits with 1 when no request succeeded or when this program, not the server, was the bottleneck.
    """
    from toolkit.bench.run import run

    raise typer.Exit(run(config))


@command(bench, "offline", OfflineConfig, *ENGINE)
def offline(
    config: OfflineConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
) -> None:
    """Many requests of mixed lengths at once: the engine's throughput.

    The answers run to their full lengths. With --load-format dummy the model needs no weights.
    """
    from toolkit.bench.engine import run_offline

    run_offline(EngineConfig(model=model, device=device, cache=cache, scheduler=scheduler), config)


@command(bench, "latency", LatencyConfig, *ENGINE)
def latency(
    config: LatencyConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
) -> None:
    """Equal requests, a few at once: milliseconds per token."""
    from toolkit.bench.engine import run_latency

    run_latency(EngineConfig(model=model, device=device, cache=cache, scheduler=scheduler), config)


@command(bench, "prefill", PrefillConfig, *ENGINE)
def prefill(
    config: PrefillConfig,
    model: ModelConfig,
    device: DeviceConfig,
    cache: BenchCacheConfig,
    scheduler: SchedulerConfig,
) -> None:
    """Long prompts, answers of one token: how fast prompts are read."""
    from toolkit.bench.engine import run_prefill

    run_prefill(EngineConfig(model=model, device=device, cache=cache, scheduler=scheduler), config)
