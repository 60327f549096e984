"""Memory of the KV cache, on the device and, for preempted requests, on the host."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from toolkit.attention import AttentionBackend
from toolkit.errors import ConfigError
from toolkit.models.cache_layout import CacheLayout
from toolkit.models.model import Model
from toolkit.weights.kinds import fp8

SWAP_PIECE = 2**26  # bytes per copy between device and host


class KVCache:
    """Blocks [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size].

    The second dimension is keys, then values."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = cache_layout(model, block_size).block_shape
        self.device, self.dtype = device, dtype
        # FP8 is stored as bytes: not every device copies it by index.
        stored = torch.uint8 if dtype == fp8.DTYPE else dtype
        self.blocks = _zeros((shape[0], 2, num_blocks, *shape[1:]), stored, device)
        self.host_blocks = _zeros(
            (shape[0], 2, num_host_blocks, *shape[1:]), stored, torch.device("cpu")
        )

    def bind(self, model: Model, backend: AttentionBackend) -> None:
        """Give each attention layer its part."""
        for layer, (keys, values) in zip(model.attention_layers(), self.blocks, strict=True):
            layer.bind(backend, keys.view(self.dtype), values.view(self.dtype))

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block, host block) pairs to the host, in stream order."""
        for source, target in self._pieces(pairs):
            self.host_blocks[:, :, target] = self.blocks[:, :, source.to(self.device)].cpu()

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, block) pairs to the device."""
        for source, target in self._pieces(pairs):
            self.blocks[:, :, target.to(self.device)] = self.host_blocks[:, :, source].to(
                self.device
            )

    def _pieces(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (sources, targets) int64, few at a time: gathering takes device memory."""
        if not pairs:
            return
        at_once = max(1, SWAP_PIECE // self.blocks[:, :, 0].nbytes)
        for some in torch.split(torch.tensor(pairs, dtype=torch.int64), at_once):
            source, target = some.unbind(1)
            yield source, target


def choose_cache_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the cache's type for activations in `dtype`. Raises ConfigError for an unfit GPU."""
    if wanted == "auto":
        return dtype
    if device.type == "cuda" and not fp8.has_arithmetic(device):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later.",
            param="kv_cache_dtype",
        )
    return fp8.DTYPE


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU these are lazy zero pages, which take memory when first written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )


def cache_layout(model: Model, block_size: int) -> CacheLayout:
    """Return the layout of this rank's part of a model's cache."""
    layers = model.attention_layers()
    shape = layers[0].shape
    return CacheLayout(len(layers), block_size, shape.num_kv_heads, shape.head_size)
