"""Files that an engine's processes read besides the model: adapters and the drafter."""

import dataclasses

from toolkit.config import EngineConfig, SpeculationConfig
from toolkit.engine.front.adapters import with_local_adapters
from toolkit.errors import errors_about
from toolkit.hub import locate


def with_local_files(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine's processes: names on the hub are replaced by folders.

    Downloads what is missing. Raises ToolkitError."""
    config, wanted = with_local_adapters(config), config.speculation.drafter
    if wanted is None or wanted.model is None:
        return config
    with errors_about("the drafter of --speculative-config"):
        folder = str(locate(wanted.model, wanted.revision))
    given = dict(config.speculation.speculative_config or {}) | {"model": folder}
    return dataclasses.replace(config, speculation=SpeculationConfig(speculative_config=given))
