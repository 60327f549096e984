"""Check for the GPU and the Triton that kernels for Hopper need."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def is_hopper(device: torch.device) -> bool:
    """Return True on Hopper with a Triton whose Gluon, still unstable, runs our kernels."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    has_gluon = (3, 6) <= version < (3, 8)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and has_gluon
