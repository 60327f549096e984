"""tk serve."""

from __future__ import annotations

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig


@command(app, "serve", ModelConfig, ServerConfig, DeviceConfig, CacheConfig, SchedulerConfig)
def serve(
    model: ModelConfig,
    server: ServerConfig,
    device: DeviceConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    import uvloop

    from toolkit.api.lifecycle import serve as run

    uvloop.run(run(EngineConfig(model=model, device=device, cache=cache, scheduler=scheduler), server))
