"""Kernels that only convert weights, as the products do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.triton.products.fp8 import unpacked
from toolkit.kernels.triton.products.matmul import like


def converted(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e4m3 numbers in a 16-bit type, or in fp32 from words of four. Their number: 2^n."""
    out = torch.full(codes.shape, torch.nan, dtype=dtype, device=codes.device)
    if dtype == torch.float32:
        _words_kernel[(1,)](codes.view(torch.int32), out, WORDS=codes.numel() // 4)
    else:
        _numbers_kernel[(1,)](codes, out, NUMBERS=codes.numel())
    return out


@triton.jit
def _numbers_kernel(code_ptr, out_ptr, NUMBERS: tl.constexpr):
    at = tl.arange(0, NUMBERS)
    tl.store(out_ptr + at, like(tl.load(code_ptr + at), out_ptr.dtype.element_ty))


@triton.jit
def _words_kernel(word_ptr, out_ptr, WORDS: tl.constexpr):
    at = tl.arange(0, WORDS)
    a, b, c, d = unpacked(tl.load(word_ptr + at))
    tl.store(out_ptr + 4 * at, a)
    tl.store(out_ptr + 4 * at + 1, b)
    tl.store(out_ptr + 4 * at + 2, c)
    tl.store(out_ptr + 4 * at + 3, d)
