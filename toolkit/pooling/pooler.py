"""Pool the hidden states of a prompt into one vector, with sentence-transformers' semantics."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.errors import CheckpointError
from toolkit.pooling.settings import Dense, PoolingConfig
from toolkit.weights.loading.loader import load_weights
from toolkit.weights.slots import Slots, plain_slots

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda x: x.softmax(-1),
}  # functions by the name of their class in torch.nn


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of a torch.nn class. Raises CheckpointError for an unknown name."""
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"Unsupported activation {name}. Supported: {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


class DenseLayer(nn.Module):
    """act(W x + b) of pooled vectors."""

    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(config.in_features, config.out_features, config.bias)
        self.activation = activation(config.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))

    def slots(self) -> Slots:
        return plain_slots(self.linear, "linear")


class Pooler(nn.Module):
    """Pooling, dense layers and normalization. Always computes in fp32."""

    def __init__(self, config: PoolingConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.ModuleList(DenseLayer(layer) for layer in config.dense)
        self.size = (
            config.dense[-1].out_features if config.dense else len(config.modes) * hidden_size
        )

    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Pool complete prompts.

        hidden: [num_tokens, hidden_size], packed. lengths: [n] int64 on the same device. Returns
        [n, size]."""
        return self.finish(
            torch.cat([pool(mode, hidden, lengths) for mode in self.config.modes], dim=1)
        )

    def finish(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map pooled [n, number of modes · hidden_size] to vectors [n, size]."""
        for layer in self.dense:
            pooled = layer(pooled)
        return F.normalize(pooled, dim=1) if self.config.normalize else pooled


def pool(mode: str, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pool [num_tokens, hidden_size] to fp32 [n, hidden_size] in one of `settings.MODES`."""
    ends = lengths.cumsum(0)
    if mode == "cls":
        return hidden[ends - lengths].float()
    if mode == "lasttoken":
        return hidden[ends - 1].float()
    prompt = torch.repeat_interleave(lengths, output_size=len(hidden))
    shape = (len(lengths), hidden.shape[1])
    if mode == "max":
        index = prompt[:, None].expand_as(hidden)
        return torch.empty(shape, device=hidden.device).scatter_reduce_(
            0, index, hidden.float(), "amax", include_self=False
        )
    sums = torch.zeros(shape, device=hidden.device).index_add_(0, prompt, hidden.float())
    return sums / (lengths.sqrt() if mode == "mean_sqrt_len_tokens" else lengths)[:, None]


def load_pooler(config: PoolingConfig, hidden_size: int, folder: Path, load_format: str) -> Pooler:
    """Load a pooler on the default device. Raises CheckpointError if its weights are unreadable."""
    pooler = Pooler(config, hidden_size).requires_grad_(False).eval()
    for layer, dense in zip(pooler.dense, config.dense, strict=True):
        assert isinstance(layer, DenseLayer)
        load_weights(layer, folder / dense.folder, load_format)
    return pooler
