"""Checks that weights and one request fit into memory."""

import os

import torch

from toolkit import units
from toolkit.config import CacheConfig
from toolkit.config.engine import MEMORY_VARIABLE
from toolkit.errors import OutOfMemoryError
from toolkit.hardware.memory import available, other_programs
from toolkit.models.memory import MemoryLayout
from toolkit.worker.startup.cache_problem import cache_problem


def require_weights_fit(
    size: int, device: torch.device, dtype: torch.dtype, whose: str = "The model's weights"
) -> None:
    """Raise OutOfMemoryError if weights of `size` bytes exceed the free memory."""
    free = available(device)
    if size > free:
        half = " --dtype bfloat16 halves that." if dtype == torch.float32 else ""
        share = " for each engine" if device.type == "cpu" and MEMORY_VARIABLE in os.environ else ""
        raise OutOfMemoryError(
            f"{whose} take {units.size(size)} in "
            f"{str(dtype).removeprefix('torch.')}, and {units.size(free)} of {device.type} memory "
            f"are free{share}.{half}{other_programs(device)}"
        )


def require_one_request_fits(
    config: CacheConfig,
    num_blocks: int,
    max_model_len: int,
    layout: MemoryLayout,
    device: torch.device,
) -> None:
    """Raise OutOfMemoryError, with what to change, if the cache is too small."""
    problem = cache_problem(
        config,
        num_blocks=num_blocks,
        layout=layout,
        max_model_len=max_model_len,
        on_gpu=device.type == "cuda",
    )
    if problem is not None:
        raise OutOfMemoryError(problem + other_programs(device), param="max_model_len")
