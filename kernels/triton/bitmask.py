"""Takes out of logits what a grammar does not allow: one bit for each token."""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import check_shape

BLOCK = 4096
"""Tokens of one program."""


def mask_logits(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Makes the logits of tokens whose bit is not set -inf, in place.

    logits: fp32 `[n, vocab]`, rows may be strided; index: int64 `[m]`, which of them; masks: int32 `[m, words]`, bit
    t % 32 of word t // 32 is token t's. Tokens past the last word are taken out.

    Raises ValueError for logits of another type, or with a strided last dimension.
    """
    _, vocab = check_shape(logits)
    if logits.dtype != torch.float32:
        raise ValueError(f"masks are for fp32 logits, not {logits.dtype}")
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
