"""A product with its end written out, without deltas: the measure of what `epilogue` costs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.triton.activation import apply
from toolkit.kernels.triton.pdl import fetch, release, supported, wait
from toolkit.kernels.triton.products import matmul
from toolkit.kernels.triton.products.epilogue import Norm, dot
from toolkit.kernels.triton.products.matmul import COLUMNS, Tile, Unscaled, load_once


def product(
    x: Tensor | Unscaled,
    weight: Tensor,
    activation: str | None,
    gated: bool,
    out: Tensor,
    norm: Norm | None,
    tile: Tile,
) -> None:
    """Compute `matmul.matmul` or `matmul.add_norm` without bias, with a tile of 64 or 128 rows."""
    unscaled = x if isinstance(x, Unscaled) else None
    x = x.x if isinstance(x, Unscaled) else x
    num_tokens, in_features = x.shape
    size = len(weight) // 2 if gated else len(weight)
    tokens = matmul._padded(num_tokens, tile)
    most = matmul.shared_memory(x.device) // (2 * COLUMNS * (tokens + tile.rows))
    pdl = supported(x.device)
    _plain_kernel[(-(-len(weight) // tile.rows),)](
        x,
        weight,
        out,
        unscaled.square_sums if unscaled else out,
        unscaled.eps if unscaled else 0.0,
        norm.residual if norm else out,
        norm.weight if norm else out,
        norm.square_sums if norm else out,
        num_tokens,
        size,
        in_features,
        TOKENS=tokens,
        ROWS=tile.rows,
        COLUMNS=COLUMNS,
        STAGES=max(1, min(tile.stages, most)),
        KIND=activation or "",
        GATED=gated,
        UNSCALED=unscaled is not None,
        LATE=matmul.late(num_tokens, activation, gated, norm is not None),
        NORMED=norm is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _plain_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    given_ptr,
    eps,
    residual_ptr,
    norm_ptr,
    found_ptr,
    num_tokens,
    size,
    in_features,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    UNSCALED: tl.constexpr,
    LATE: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    if not LATE:
        release(PDL)
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    WEIGHT_FIRST: tl.constexpr = ROWS == 64 or (TOKENS < 64 and ROWS >= TOKENS)
    lane = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * OUTPUTS + lane % OUTPUTS, size - 1)
    if GATED:
        row += lane // OUTPUTS * size
    rows = weight_ptr + (row.to(tl.int64) * in_features)[:, None]
    if PDL:
        fetch(rows + tl.arange(0, 4)[None, :] * 64)
    token = tl.arange(0, TOKENS)
    out_row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    stored = (token < num_tokens)[:, None] & (out_row < size)[None, :]
    at_out = (token * size)[:, None] + out_row[None, :]
    if NORMED:
        norm = tl.load(norm_ptr + out_row, mask=out_row < size, other=0.0).to(tl.float32)
    column = tl.arange(0, COLUMNS)[None, :]
    x_rows = x_ptr + (token * in_features)[:, None]
    in_x = (token < num_tokens)[:, None]
    if WEIGHT_FIRST:
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
    wait(PDL)
    if UNSCALED:
        square_sums = tl.load(given_ptr + token, mask=token < num_tokens, other=0.0).to(tl.float32)
    if NORMED:
        residual = tl.load(residual_ptr + at_out, mask=stored, other=0.0)
    for start in tl.range(0, in_features, COLUMNS, num_stages=STAGES):
        weight = load_once(rows + start + column, column < COLUMNS, True)
        x = tl.load(x_rows + start + column, mask=in_x, other=0.0)
        if WEIGHT_FIRST:
            acc = dot(weight, x, acc)
        else:
            acc = dot(x, weight, acc)
    if LATE:
        release(PDL)
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    if UNSCALED:
        acc *= tl.rsqrt(square_sums / in_features + eps)[:, None]
    if GATED:
        y, up = tl.split(tl.permute(tl.reshape(acc, [TOKENS, 2, OUTPUTS]), [0, 2, 1]))
    else:
        y = acc
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= up
    if NORMED:
        total = (y + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + at_out, total, mask=stored)
        y = tl.where(stored, total.to(tl.float32), 0.0)
        square_sums = tl.sum(y * y, 1).to(tl.float64)
        tl.atomic_add(found_ptr + token, square_sums, mask=token < num_tokens, sem="relaxed")
        y *= norm[None, :]
    tl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=stored)
