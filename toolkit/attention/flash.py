"""Prompts through flash-attn, whichever is installed, on our paged cache; single tokens through our own kernel."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from toolkit.attention.backend import AttentionBatch, AttentionShape
from toolkit.attention.triton import TritonBackend

FLASH_2_PAGE = 256
"""flash-attn 2 takes blocks of a multiple of this many tokens."""


class FlashBackend(TritonBackend):
    """`flash_attn.cute` (FlashAttention-4) on Hopper and Blackwell, `flash_attn` 2.x on other GPUs from Ampere up.

    Both see a step's requests by their block tables. Where each request has a single token, steps stay with our kernel: it is nearer to the
    bandwidth (BENCHMARKS.md, "Kernels"), and flash-attn 4 does not split the keys of one request on Hopper.
    """

    name = "flash"
    takes_fp8 = False

    def __init__(self) -> None:
        super().__init__()
        self._cute = _prefers_cute(torch.device("cuda", torch.cuda.current_device()))
        if self._cute:
            from flash_attn.cute import flash_attn_varlen_func
        else:
            from flash_attn import flash_attn_varlen_func
        self._flash = flash_attn_varlen_func

    @classmethod
    def unfit(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        problem = super().unfit(device, dtype, head_size, block_size)
        if problem is not None:
            return problem
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        if dtype not in (torch.float16, torch.bfloat16):
            return (
                f"takes float16 and bfloat16, and the model is {str(dtype).removeprefix('torch.')}"
            )
        if head_size % 8:
            return f"takes head sizes that are multiples of 8, and the model's is {head_size}"
        if _prefers_cute(device):
            return None
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "needs a GPU from Ampere up"
        if find_spec("flash_attn.flash_attn_interface") is None:
            return "flash-attn 2 is not installed, and flash-attn-4 needs Hopper or Blackwell"
        if block_size % FLASH_2_PAGE:
            return f"flash-attn 2 needs --block-size {FLASH_2_PAGE} or a multiple of it"
        return None

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
    ) -> torch.Tensor:
        if batch.max_query_len == 1:
            return super().attend(query, k_cache, v_cache, batch, shape)
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
        table = self._table(batch, k_cache.shape[1])
        if self._cute:
            both = self._flash(
                query, k_cache, v_cache, seqused_k=batch.seq_lens, page_table=table, **options
            )
            out: torch.Tensor = both[0] if isinstance(both, tuple) else both
        else:
            ends = self._ends(batch)
            out = self._flash(
                query, k_cache, v_cache, cu_seqlens_k=ends, block_table=table, **options
            )
        return out

    @property
    def _no_window(self) -> tuple[int | None, int | None]:
        return (None, None) if self._cute else (-1, -1)

    def _table(self, batch: AttentionBatch, block_size: int) -> torch.Tensor:
        """[num_reqs, max_blocks] int32, taken once for all layers."""
        table: torch.Tensor | None = batch.plan.get("flash table")
        if table is None:
            table = batch.block_table[:, : -(-batch.max_seq_len // block_size)][batch.rows]
            batch.plan["flash table"] = table
        return table

    def _ends(self, batch: AttentionBatch) -> torch.Tensor:
        """Where each request's keys would end if they were packed, [num_reqs + 1] int32."""
        ends: torch.Tensor | None = batch.plan.get("flash ends")
        if ends is None:
            ends = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            batch.plan["flash ends"] = ends
        return ends


def _prefers_cute(device: torch.device) -> bool:
    """Whether FlashAttention-4 is there and made for this GPU."""
    return find_spec("flash_attn.cute") is not None and torch.cuda.get_device_capability(device)[
        0
    ] in (9, 10)
