"""The layout of the KV cache: the shapes of each layer's keys and values. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import CheckpointError
from toolkit.models.describe import Attention


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a layer's keys and values, if no more is known of its attention."""

    num_kv_heads: int
    head_size: int
    window: int = 0  # tokens; 0: none


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Blocks of one pool. Each holds the keys and values of `block_size` tokens in all layers.

    Layers with a sliding window keep all tokens, like the others."""

    num_layers: int
    block_size: int
    num_kv_heads: int  # on one rank
    head_size: int

    @classmethod
    def of(
        cls, attention: Sequence[Attention | KVShape], block_size: int, num_ranks: int
    ) -> CacheLayout | None:
        """Return the layout for these layers on each of `num_ranks`; None without layers.

        Raises CheckpointError if the layers have different shapes."""
        shapes = {(layer.num_kv_heads, layer.head_size) for layer in attention}
        if not shapes:
            return None
        if len(shapes) > 1:
            raise CheckpointError(
                f"Layers have keys of several shapes (heads, size): {sorted(shapes)}. tk supports "
                f"one."
            )
        ((heads, head_size),) = shapes
        # With fewer heads than ranks, several ranks have the same head.
        return cls(len(attention), block_size, max(1, heads // num_ranks), head_size)

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block's keys: [num_layers, block_size, num_kv_heads, head_size]."""
        return self.num_layers, self.block_size, self.num_kv_heads, self.head_size

    def layer_bytes(self, itemsize: int) -> int:
        """Return the bytes of one layer's part of a block: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * itemsize

    def block_bytes(self, itemsize: int) -> int:
        return self.num_layers * self.layer_bytes(itemsize)
