"""Activation functions by the names that configs give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from toolkit.errors import CheckpointError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raises CheckpointError for a name that is not in the table."""
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"The model's activation function {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]
