"""Kinds of activation functions, by the names in config.json. Imports no torch."""

from toolkit.errors import CheckpointError
from toolkit.kernels.gates import Gate

KINDS = {kind: kind for kind in ("silu", "relu", "relu2", "gelu", "gelu_tanh", "gelu_quick")} | {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
}
"""Kinds (of `kernels.reference.ACTIVATIONS`) by name: their own, and Transformers' names for them
(`transformers.activations`)."""


def gate_kind(activation: Gate) -> Gate:
    """Return the kind for a name in config.json; other gates as they are."""
    return activation_kind(activation) if isinstance(activation, str) else activation


def activation_kind(name: str) -> str:
    """Return the kind for a name in config.json. Raises CheckpointError for an unknown name."""
    if name not in KINDS:
        raise CheckpointError(
            f"Unsupported activation function {name!r}. Supported: {', '.join(KINDS)}."
        )
    return KINDS[name]
