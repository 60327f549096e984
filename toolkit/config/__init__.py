"""All settings, in one table. See `fields.option`."""

from toolkit.config.engine import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    PictureConfig,
    PluginConfig,
    SchedulerConfig,
)
from toolkit.config.fields import Option, build, option, options
from toolkit.config.run import RunConfig
from toolkit.config.server import ServerConfig
from toolkit.config.speculation import Speculation, SpeculationConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LoRAConfig",
    "ModelConfig",
    "Option",
    "ParallelConfig",
    "PictureConfig",
    "PluginConfig",
    "RunConfig",
    "SchedulerConfig",
    "ServerConfig",
    "Speculation",
    "SpeculationConfig",
    "build",
    "option",
    "options",
]
