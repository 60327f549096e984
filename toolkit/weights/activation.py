"""Activation functions by the names that configs give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from toolkit.errors import CheckpointError

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By kind."""

KINDS = {kind: kind for kind in FUNCTIONS} | {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation_kind(name: str) -> str:
    """The kind that a config's name stands for. Raises CheckpointError for a name that is not in the table."""
    if name not in KINDS:
        raise CheckpointError(
            f"The model's activation function {name!r} is not supported; these are: {', '.join(KINDS)}."
        )
    return KINDS[name]
