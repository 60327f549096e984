"""What a worker tells of itself. Light: no torch."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from toolkit.pooling.settings import PoolingInfo

Report = Callable[[str, float], None]
"""Called with a start-up phase's name and its seconds."""


class WorkerInfo(msgspec.Struct, kw_only=True):
    """What start-up found out. Sizes in bytes, lengths in tokens."""

    device: str
    dtype: str
    attention_backend: str
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    num_parameters: int
    weight_bytes: int
    cache_bytes: int
    async_scheduling: bool
    world_size: int = 1
    """Ranks that share the model; sizes are of one of them."""
    model_parameters: int = 0
    """Of the whole model."""
    attention_size: int = 0
    """Of all layers together: query heads times head size."""
    generates: bool = True
    """Whether prompts can be continued."""
    chunks_prompts: bool = True
    """Whether a prompt can be computed in several steps."""
    pooling: PoolingInfo | None = None
    """What prompts can be pooled to."""

    @property
    def token_bytes(self) -> float:
        """Of the KV cache, for each token."""
        return self.cache_bytes / max(1, self.num_blocks * self.block_size)

    @property
    def tasks(self) -> list[str]:
        """What the model does: `generate`, `embed`, `score`."""
        return ["generate"] * self.generates + (
            [self.pooling.task] if self.pooling is not None else []
        )
