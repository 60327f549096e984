"""The interface of attention backends, and the choice among them."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from toolkit.errors import ConfigError


@dataclass(slots=True)
class AttentionBatch:
    """What a step's attention is over. Tokens of all requests are packed, request after request.

    On the device: `positions` [num_tokens]; `slot_mapping` [num_tokens] int64, where each token's key and value go
    (negative: nowhere); `query_start_loc` [num_reqs + 1], `seq_lens` [num_reqs] (this step's tokens included), `rows`
    [num_reqs], each request's row in `block_table` [num_rows, max_blocks]; int32. The maxima bound the lengths from
    above. On the host, unless the step is captured in a CUDA graph: `query_lens` and `context_lens` (the same as
    seq_lens), int32.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    wanted: torch.Tensor | None = None
    """The tokens whose last hidden states are asked for, int64; None: all. The last layer spares the others what comes
    after attention."""
    order: torch.Tensor | None = None
    """[num_reqs] int32: the requests, those with the longest contexts first."""
    query_lens: npt.NDArray[np.int32] | None = None
    context_lens: npt.NDArray[np.int32] | None = None
    plan: dict[Hashable, Any] = field(default_factory=dict)
    """What was prepared for this step and serves several layers."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer's shape. `sliding_window` counts the token itself; 0: all before it. `soft_cap` 0:
    none.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What is done to queries and keys before they meet: a root mean square norm of each head (Qwen3), then a rotation
    by position. None: not done.
    """

    cos_sin: torch.Tensor | None = None
    """[max_model_len, 2, rotary_size / 2]"""
    q_weight: torch.Tensor | None = None
    """[head_size]"""
    k_weight: torch.Tensor | None = None
    eps: float = 0.0


class AttentionBackend(abc.ABC):
    """Writes keys and values into the cache and attends over it.

    Caches: [num_blocks, block_size, num_kv_heads, head_size], of the queries' type or FP8 (e4m3): then keys and values
    are the nearest that there are, the greatest for what is beyond, and products are of the queries' precision.
    """

    name: ClassVar[str]
    capturable: ClassVar[bool] = False
    """Whether CUDA graphs of it serve other lengths than those it was captured with."""
    takes_fp8: ClassVar[bool] = True
    """Whether the caches may be in FP8."""

    @classmethod
    @abc.abstractmethod
    def unfit(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        """Why it cannot run there; None when it can."""

    def forward(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        transform: HeadTransform,
    ) -> torch.Tensor:
        """`write`, then `attend`."""
        query = self.write(qkv, k_cache, v_cache, batch, shape, transform)
        return self.attend(query, k_cache, v_cache, batch, shape)

    @abc.abstractmethod
    def write(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        transform: HeadTransform,
    ) -> torch.Tensor:
        """Transforms the heads of qkv [num_tokens, (num_heads + 2 · num_kv_heads) · head_size], puts keys and values into
        their slots and returns the queries [num_tokens, num_heads, head_size].
        """

    @abc.abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Causal attention of query [num_tokens, num_heads, head_size] over the requests' cached tokens; same
        shape.
        """


BACKENDS = {
    "triton": "toolkit.attention.triton:TritonBackend",
    "flash": "toolkit.attention.flash:FlashBackend",
    "cpu": "toolkit.attention.cpu:CPUBackend",
    "torch": "toolkit.attention.torch:TorchBackend",
}
"""In order of preference."""


def choose_backend(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    block_size: int,
    *,
    fp8_cache: bool = False,
) -> tuple[AttentionBackend, str]:
    """(the backend, why it was chosen). Raises ConfigError when the one asked for does not fit, saying why."""
    reasons: list[str] = []
    for name in BACKENDS if wanted == "auto" else [wanted]:
        module, _, attribute = BACKENDS[name].partition(":")
        backend: type[AttentionBackend] = getattr(import_module(module), attribute)
        problem = backend.unfit(device, dtype, head_size, block_size)
        if fp8_cache and not backend.takes_fp8:
            problem = "takes no --kv-cache-dtype fp8"
        if problem is None:
            why = "asked for" if wanted != "auto" else f"the first that fits {device.type}"
            return backend(), "; ".join([why, *reasons])
        reasons.append(f"{name}: {problem}")
    raise ConfigError(
        f"The attention backend {wanted} cannot run here: {'; '.join(reasons)}.",
        param="attention_backend",
    )
