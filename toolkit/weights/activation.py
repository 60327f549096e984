"""Activation functions, by kind and by the names in config.json."""

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

KINDS = {kind: kind for kind in FUNCTIONS} | {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation_kind(name: str) -> str:
    """Return the kind for a name in config.json. Raises CheckpointError for an unknown name."""
    if name not in KINDS:
        raise CheckpointError(
            f"Unsupported activation function {name!r}. Supported: {', '.join(KINDS)}."
        )
    return KINDS[name]
