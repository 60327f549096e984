"""Grammar masks on logits: one bit per token."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import check_shape

BLOCK = 4096  # tokens per program


def mask_logits(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens whose bit is not set to -inf, in place.

    logits: fp32 `[n, vocab]`, rows may be strided; index: int64 `[m]`, rows of it; masks: int32
    `[m, words]`, bit t % 32 of word t // 32 is for token t. Tokens past the last word are masked.

    Raises ValueError for logits of another type, or with a strided last dimension."""
    _, vocab = check_shape(logits)
    if logits.dtype != torch.float32:
        raise ValueError(f"masked logits must be fp32, not {logits.dtype}")
    if len(index) == 0:
        return
    grid = (triton.cdiv(vocab, BLOCK), len(index))
    _mask_kernel[grid](
        logits,
        index,
        masks.contiguous(),
        logits.stride(0),
        masks.shape[1],
        vocab,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _mask_kernel(logits_ptr, index_ptr, mask_ptr, stride, words, vocab, BLOCK: tl.constexpr):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.load(index_ptr + entry)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask_ptr + entry * words + token // 32, mask=token // 32 < words, other=0)
    forbidden = (word >> (token % 32)) & 1 == 0
    place = logits_ptr + row * stride + token
    tl.store(place, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden & (token < vocab))
