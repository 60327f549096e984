"""Products with weights in groups of 128 four-bit numbers: a second main loop for `epilogue`.

A row's columns are in blocks of 512. Word w of a block's 64 has, in its bits from 4 * j on, column
64 * j + w: a tile of words, shifted, is then a tile of 64 adjacent columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.triton import epilogue
from toolkit.kernels.triton.matmul import Unscaled, load_once
from toolkit.kernels.triton.pdl import fetch, release, supported, wait

GROUP = 128  # columns with one scale and one zero
SHARED_BYTES = 200 << 10  # for tiles in flight
WORDS = tl.constexpr(64)  # per block of a row


class Int4(NamedTuple):
    """A weight [rows, columns] of numbers (q - zero) * scale, with q and zero in 0 to 15."""

    words: Tensor  # int32 [rows, columns / 8]
    scales: Tensor  # [columns / GROUP, rows], in any type
    zeros: Tensor  # uint8 [columns / GROUP, rows]

    def dequantize(self) -> Tensor:
        """Return the weight in fp32."""
        blocks = self.words.view(len(self.words), -1, 1, 64)
        shifts = 4 * torch.arange(8, device=blocks.device)[:, None]
        numbers = ((blocks >> shifts) & 15).reshape(len(blocks), -1, GROUP)
        wide = (numbers - self.zeros.T[..., None].int()) * self.scales.T[..., None].float()
        return wide.flatten(1)


def random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Int4:
    """Return a random weight whose products have about the size of their input."""
    shape = columns // GROUP, rows
    top = 2**31
    return Int4(
        torch.randint(-top, top - 1, (rows, columns // 8), dtype=torch.int32, device=device),
        ((torch.rand(shape, device=device) + 0.5) / (5 * columns**0.5)).to(dtype),
        torch.randint(5, 11, shape, dtype=torch.uint8, device=device),
    )


def product(
    x: Tensor | Unscaled,
    weight: Int4,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor,
    norm: epilogue.Norm | None = None,
    delta: epilogue.Delta | None = None,
    rows: int = 64,
) -> Tensor:
    """Compute `matmul.matmul` or `matmul.add_norm`. `rows`: of the weight in a tile."""
    unscaled = x if isinstance(x, Unscaled) else None
    x = x.x if isinstance(x, Unscaled) else x
    num_rows = len(weight.words)
    size = num_rows // 2 if gated else num_rows
    tokens = max(16, 1 << (len(x) - 1).bit_length())
    pdl = supported(x.device)
    _int4_kernel[(-(-num_rows // rows),)](
        x,
        *weight,
        out if bias is None else bias,
        out,
        unscaled.square_sums if unscaled else out,
        unscaled.eps if unscaled else 0.0,
        norm.residual if norm else out,
        norm.weight if norm else out,
        norm.square_sums if norm else out,
        *(delta or (out, out, out, out)),
        len(x),
        size,
        x.shape[1],
        num_rows,
        TOKENS=tokens,
        ROWS=rows,
        STAGES=min(6, SHARED_BYTES // (512 * x.itemsize * tokens + 256 * rows)),
        BIASED=bias is not None,
        KIND=activation or "",
        GATED=gated,
        UNSCALED=unscaled is not None,
        NORMED=norm is not None,
        RANK=delta.low.shape[1] if delta else 0,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


@triton.jit
def _numbers(words, zero, J: tl.constexpr, DTYPE: tl.constexpr):
    """Return q - zero for the columns in bits 4 * J on of each word."""
    q = (words >> 4 * J) & 15
    if DTYPE.is_bf16() and not epilogue.INTERPRETED:
        # 0x4300 is 128, and its last bits count ones: the conversion of integers is slow.
        q = (q | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return q - (zero + 128).to(tl.bfloat16)[:, None]
    return (q - zero.to(tl.int32)[:, None]).to(tl.float32).to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    given_ptr,
    eps,
    residual_ptr,
    norm_ptr,
    found_ptr,
    low_ptr,
    up_ptr,
    slot_ptr,
    used_ptr,
    num_tokens,
    size,
    in_features,
    num_rows,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    UNSCALED: tl.constexpr,
    NORMED: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x by ROWS rows of the weight. Each sum of a group is scaled, not its numbers."""
    row, out_row = epilogue.tile_rows(size, ROWS, GATED)
    rows = weight_ptr + (row.to(tl.int64) * (in_features // 8))[:, None]
    word = tl.arange(0, WORDS)[None, :]
    if PDL:
        fetch(rows + tl.arange(0, 4)[None, :] * 32)
    token = tl.arange(0, TOKENS)
    at_out, stored = epilogue.tile_outputs(token, out_row, num_tokens, size)
    constants = epilogue.load_constants(
        scale_ptr, bias_ptr, norm_ptr, row, out_row, size, False, BIASED, NORMED
    )
    x_rows = x_ptr + (token * in_features)[:, None] + word
    in_x = (token < num_tokens)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    wait(PDL)
    inputs = epilogue.load_inputs(
        given_ptr,
        residual_ptr,
        low_ptr,
        slot_ptr,
        used_ptr,
        token,
        at_out,
        stored,
        num_tokens,
        UNSCALED,
        NORMED,
        RANK,
    )
    for start in tl.range(0, in_features, 8 * WORDS, num_stages=STAGES):
        words = load_once(rows + start // 8 + word, word < WORDS, True)
        for group in tl.static_range(4):
            at = (start // 128 + group) * num_rows + row
            scale = tl.load(scale_ptr + at).to(tl.float32)
            zero = tl.load(zero_ptr + at)
            part = tl.zeros([ROWS, TOKENS], tl.float32)
            for half in tl.static_range(2):
                x = tl.load(x_rows + start + (2 * group + half) * WORDS, mask=in_x, other=0.0)
                part = epilogue.dot(_numbers(words, zero, 2 * group + half, x.dtype), x, part)
            acc += part * scale[:, None]
    release(PDL)
    epilogue.finish(
        acc,
        constants,
        inputs,
        out_ptr,
        residual_ptr,
        found_ptr,
        up_ptr,
        used_ptr,
        row,
        token,
        at_out,
        stored,
        num_tokens,
        size,
        in_features,
        eps,
        False,
        BIASED,
        UNSCALED,
        NORMED,
        RANK,
        KIND,
        GATED,
        True,
    )
