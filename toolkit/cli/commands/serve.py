"""`tk serve`."""

import typer

from toolkit.cli import START
from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    PictureConfig,
    PluginConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
)
from toolkit.config.dry_run import DetachConfig, DryRunConfig


@command(
    app,
    "serve",
    ModelConfig,
    ServerConfig,
    LoRAConfig,
    SpeculationConfig,
    PluginConfig,
    DeviceConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    PictureConfig,
    DryRunConfig,
    DetachConfig,
)
def serve(
    model: ModelConfig,
    server: ServerConfig,
    lora: LoRAConfig,
    speculation: SpeculationConfig,
    plugins: PluginConfig,
    device: DeviceConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig,
    pictures: PictureConfig,
    dry: DryRunConfig,
    detached: DetachConfig,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    engine = EngineConfig(
        model=model,
        device=device,
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        plugins=plugins,
        lora=lora,
        speculation=speculation,
        pictures=pictures,
    )
    if dry.dry_run:
        from toolkit.inventory.dry_run import dry_run
        from toolkit.serving.checks import check_server_settings

        check_server_settings(engine, server)
        raise typer.Exit(dry_run(engine, as_json=dry.json))
    if detached.detach:
        from toolkit.serving.detach import detach

        raise typer.Exit(detach(server))
    import uvloop

    from toolkit.serving.lifecycle import serve as run

    raise typer.Exit(uvloop.run(run(engine, server, START)))
