"""Which numbers of ranks a model can be shared out over."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.config import EngineConfig
from toolkit.distributed import Group, parallel
from toolkit.errors import ConfigError
from toolkit.models.loader import build_model, load_config
from toolkit.models.registry import CausalLM, resolve_architecture

MOST = 64
"""Ranks up to which sizes are tried, to name those that can be."""


def require_size(config: EngineConfig, folder: Path) -> None:
    """Raises ConfigError, with the sizes that can be, for one that cannot: more ranks than GPUs, or heads and features that they
    cannot share evenly.
    """
    wanted = config.parallel.tensor_parallel_size
    gpus = torch.cuda.device_count() if config.device.device != "cpu" else 0
    if gpus and wanted > gpus:
        raise ConfigError(
            f"--tensor-parallel-size {wanted} needs as many GPUs, and PyTorch sees {gpus} here.",
            param="tensor_parallel_size",
        )
    if not issubclass(resolve_architecture(load_config(folder), str(folder)), CausalLM):
        raise ConfigError(
            f"--tensor-parallel-size {wanted}: encoders run whole on one device.",
            param="tensor_parallel_size",
        )
    problem = _problem(config, folder, wanted)
    if problem is not None:
        fits = [size for size in range(1, (gpus or MOST) + 1) if _problem(config, folder, size) is None]
        raise ConfigError(
            f"{problem} Sizes that can be: {', '.join(map(str, fits))}.", param="tensor_parallel_size"
        )


def _problem(config: EngineConfig, folder: Path, size: int) -> str | None:
    """Why a size cannot be: what building a sketch of the model says."""
    try:
        with parallel(Group(0, size)):
            build_model(
                load_config(folder), folder, device=torch.device("meta"), dtype=torch.float32, max_model_len=1
            )
    except ConfigError as error:
        return error.message
    return None
