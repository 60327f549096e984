"""The flash-attn backend: prompts by the installed flash-attn, decode steps by our kernel."""

from importlib.util import find_spec

import torch

from toolkit.attention.backend import AttentionBatch, AttentionLayer
from toolkit.attention.triton import TritonBackend

FLASH_2_PAGE = 256  # flash-attn 2 needs a block size divisible by this
FLASH_HEAD = 256  # largest head size
CUTE_BLACKWELL_HEAD = 128
"""Largest head size of flash-attn-4 on Blackwell with a paged cache. Hopper has up to 256."""


class FlashBackend(TritonBackend):
    """`flash_attn.cute` (FlashAttention-4) on Hopper and Blackwell, `flash_attn` 2.x since Ampere.

    Both read the paged cache by block tables. Decode steps use our kernel: it comes closer to the
    memory bandwidth, and flash-attn 4 does not split the keys of a request on Hopper. Layers with
    sinks or chunks, and steps with tokens that see later ones, use our kernels."""

    name = "flash"
    supports_fp8 = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._cute = _prefers_cute(device)
        if self._cute:
            from flash_attn.cute import flash_attn_varlen_func
        else:
            from flash_attn import flash_attn_varlen_func
        self._flash = flash_attn_varlen_func

    @classmethod
    def unsupported_reason(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        problem = super().unsupported_reason(device, dtype, head_size, block_size)
        if problem is not None:
            return problem
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        if dtype not in (torch.float16, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            return f"supports float16 and bfloat16, and the model is {name}"
        if head_size % 8 or head_size > FLASH_HEAD:
            return (
                f"supports head sizes divisible by 8 up to {FLASH_HEAD}, and the model's is "
                f"{head_size}"
            )
        capability = torch.cuda.get_device_capability(device)
        if _prefers_cute(device):
            if capability[0] == 10 and head_size > CUTE_BLACKWELL_HEAD:
                return (
                    f"flash-attn-4 supports head sizes up to {CUTE_BLACKWELL_HEAD} on Blackwell, "
                    f"and the model's is {head_size}"
                )
            return None
        if capability < (8, 0):
            return "needs Ampere or a later GPU"
        if find_spec("flash_attn.flash_attn_interface") is None:
            return "flash-attn 2 is not installed, and flash-attn-4 needs Hopper or Blackwell"
        if block_size % FLASH_2_PAGE:
            return f"flash-attn 2 needs --block-size {FLASH_2_PAGE} or a multiple"
        return None

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        shape = layer.shape
        is_decode = batch.max_query_len == 1 or batch.verifies
        needs_ours = shape.chunk or shape.sinks is not None or batch.last_key is not None
        if is_decode or needs_ours:
            return super().attend(layer, query, batch)
        options = {
            "softmax_scale": shape.scale,
            "causal": True,
            "window_size": (shape.sliding_window - 1, 0)
            if shape.sliding_window
            else self._no_window,
            "softcap": shape.soft_cap,
            "max_seqlen_q": batch.max_query_len,
            "max_seqlen_k": batch.max_seq_len,
            "cu_seqlens_q": batch.query_start_loc,
        }
        caches = layer.k_cache, layer.v_cache
        table = self._table(layer, batch)
        if self._cute:
            both = self._flash(
                query, *caches, seqused_k=batch.seq_lens, page_table=table, **options
            )
            out: torch.Tensor = both[0] if isinstance(both, tuple) else both
        else:
            ends = self._ends(batch)
            out = self._flash(query, *caches, cu_seqlens_k=ends, block_table=table, **options)
        return out

    @property
    def _no_window(self) -> tuple[int | None, int | None]:
        return (None, None) if self._cute else (-1, -1)

    def _table(self, layer: AttentionLayer, batch: AttentionBatch) -> torch.Tensor:
        """Return block tables [num_reqs, max_blocks] int32, gathered once for layers of a group."""
        key, block_size = ("flash table", layer.group), layer.k_cache.shape[1]
        table: torch.Tensor | None = batch.plan.get(key)
        if table is None:
            most = -(-batch.max_seq_len // block_size)
            table = batch.tables[layer.group].blocks[:, :most][batch.rows]
            batch.plan[key] = table
        return table

    def _ends(self, batch: AttentionBatch) -> torch.Tensor:
        """Return cumulative key counts [num_reqs + 1] int32, computed once for all layers."""
        ends: torch.Tensor | None = batch.plan.get("flash ends")
        if ends is None:
            ends = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            batch.plan["flash ends"] = ends
        return ends


def _prefers_cute(device: torch.device) -> bool:
    """Return True if FlashAttention-4 is installed and supports this GPU."""
    if find_spec("flash_attn.cute") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
