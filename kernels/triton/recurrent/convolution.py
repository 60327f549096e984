"""Short convolutions. The inputs of a request's last tokens are in its slot: that of the token at
position p in row p % ROWS.

Definition: `toolkit.kernels.recurrent.gated_convolution`."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.recurrent import CHUNK, EPS

from ..pdl import release, supported, wait
from ..sizes import power_of_two
from .step import RecurrentStep, drafts_of, snapshot_of, tokens_of

CHANNELS_EACH = 64  # channels of a program
TOKENS_EACH = 16  # of a chunk
_EPS = tl.constexpr(EPS)


class GatedConvolution:
    """A layer: `recurrent.gated_convolution`, which has the arguments.

    kernel: [channels, width]; inputs: [slots, rows, channels] in y's type."""

    def __init__(self, kernel: Tensor, bias: Tensor | None, inputs: Tensor) -> None:
        self._kernel, self._bias = kernel.T.contiguous(), bias
        self._inputs = inputs

    def __call__(self, y: Tensor, step: RecurrentStep) -> Tensor:
        """Return [num_tokens, channels]. y: [num_tokens, b | c | x]."""
        width, channels = self._kernel.shape
        out = torch.empty(len(y), channels, dtype=y.dtype, device=y.device)
        if step.has_prompts:
            convolve_prompts(y, out, self._kernel, self._bias, self._inputs, step, is_gated=True)
        pdl = supported(y.device)
        _convolution_step_kernel[(step.num_reqs, -(-channels // CHANNELS_EACH))](
            y,
            y.stride(0),
            out,
            self._kernel,
            self._bias,
            self._inputs,
            *step.requests,
            *step.drafts,
            channels,
            MOST=step.most_verified,
            ROWS=self._inputs.shape[1],
            WIDTH=width,
            BLOCK=CHANNELS_EACH,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=1,
        )
        return out


def convolve_prompts(
    y: Tensor,
    out: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    step: RecurrentStep,
    *,
    is_gated: bool = False,
    units: int = 0,
    head: int = 1,
) -> None:
    """Convolve the first channels of y for requests that compute prompts.

    kernel: [width, channels]; is_gated: as in `GatedConvolution`; with `units`, silu follows, and
    the first `units` heads of `head` channels get length 1. out: [num_tokens, channels]."""
    width, channels = kernel.shape
    block = max(16, power_of_two(head)) if units else CHANNELS_EACH
    blocks = units + -(-(channels - units * head) // block)
    _convolve_kernel[(step.max_chunks, blocks, CHUNK // TOKENS_EACH)](
        y,
        y.stride(0),
        out,
        kernel,
        bias,
        inputs,
        step.chunks,
        *step.requests[:3],
        channels,
        inputs.shape[2],
        ROWS=inputs.shape[1],
        WIDTH=width,
        BLOCK=block,
        COUNT=TOKENS_EACH,
        GATED=is_gated,
        UNITS=units,
        HEAD=head,
        num_warps=4,
    )
    _remember_kernel[(step.num_reqs, -(-channels // CHANNELS_EACH))](
        y,
        y.stride(0),
        inputs,
        *step.requests,
        channels,
        inputs.shape[2],
        MOST=step.most_verified,
        ROWS=inputs.shape[1],
        WIDTH=width,
        BLOCK=CHANNELS_EACH,
        GATED=is_gated,
        num_warps=1,
    )


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _inputs(y_ptr, row, stride, channel, channels, live, GATED: tl.constexpr):
    """Return inputs of a convolution."""
    own = y_ptr + row.to(tl.int64) * stride + channel
    x = tl.load(own, mask=live, other=0.0)
    if GATED:
        x = x * tl.load(own + 2 * channels, mask=live, other=0.0)
    return x


@triton.jit
def taps_of(
    y_ptr, stride, input_ptr, columns, channel, channels, live, position, first, start, read,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Return the inputs for one position's convolution, oldest first, [taps, channels].

    channel, live: [1, channels]; taps: WIDTH, and zeros."""
    TAPS: tl.constexpr = triton.next_power_of_2(WIDTH)
    tap = tl.arange(0, TAPS)[:, None]
    at = position - (WIDTH - 1) + tap
    is_tap = live & (tap < WIDTH)
    x = _inputs(y_ptr, first + at - start, stride, channel, channels, is_tap & (at >= start), GATED)
    old_ptr = input_ptr + (read * ROWS + at % ROWS) * columns + channel
    return x + tl.load(old_ptr, mask=is_tap & (at >= 0) & (at < start), other=0.0)


@triton.jit
def remember(
    x, input_ptr, columns, channel, live, position, slot, all_taps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Keep the last of `taps_of` in a slot, or all but the first."""
    TAPS: tl.constexpr = triton.next_power_of_2(WIDTH)
    tap = tl.arange(0, TAPS)[:, None]
    at = position - (WIDTH - 1) + tap
    own_ptr = input_ptr + (slot * ROWS + at % ROWS) * columns + channel
    is_wanted = (tap == WIDTH - 1) | (all_taps & (tap > 0) & (tap < WIDTH))
    tl.store(own_ptr, x, mask=live & (at >= 0) & is_wanted)


@triton.jit
def _convolution_step_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    bias_ptr,
    input_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    kept_ptr,
    begin_ptr,
    written_ptr,
    channels,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some channels of a request's tokens, if they are no prompt."""
    wait(PDL)
    release(PDL)
    request = tl.program_id(0)
    first, count, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if (count < 1) | (count > MOST):
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    begin, written = drafts_of(request, start, start + count, begin_ptr, written_ptr)
    keep, kept = snapshot_of(request, begin, written, keep_ptr, kept_ptr)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = channel < channels
    TAPS: tl.constexpr = triton.next_power_of_2(WIDTH)
    tap = tl.arange(0, TAPS)[:, None]
    weights = tl.load(kernel_ptr + tap * channels + channel, mask=live & (tap < WIDTH), other=0.0)
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = own < channels
    for position in range(begin, start + count):
        x = taps_of(y_ptr, stride, input_ptr, channels, channel, channels, live, position, first,
                    start, read, ROWS, WIDTH, True)  # fmt: skip
        if position >= start:
            total = tl.sum(x.to(tl.float32) * weights.to(tl.float32), 0)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + own, mask=is_own, other=0.0).to(tl.float32)
            token = (first + position - start).to(tl.int64)
            gate = tl.load(y_ptr + token * stride + channels + own, mask=is_own, other=0.0)
            tl.store(out_ptr + token * channels + own, gate * total.to(x.dtype), mask=is_own)
            is_last = (position + 1 == written) & (read != write)
            is_late = live & (position + WIDTH > written)  # later steps need it
            remember(x, input_ptr, channels, channel, is_late, position, write, is_last, ROWS,
                     WIDTH)  # fmt: skip
        if position + 1 == kept:
            remember(x, input_ptr, channels, channel, live, position, keep, True, ROWS, WIDTH)


@triton.jit
def _convolve_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    bias_ptr,
    input_ptr,
    chunk_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    channels,
    columns,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    GATED: tl.constexpr,
    UNITS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Convolve some channels of some tokens of a chunk."""
    chunk, block = tl.program_id(0) * 4, tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk), tl.load(chunk_ptr + chunk + 1)
    request, first = tl.load(chunk_ptr + chunk + 2), tl.load(chunk_ptr + chunk + 3)
    begin += tl.program_id(2) * COUNT
    if begin >= end:
        return
    inside = tl.arange(0, BLOCK)
    channel = block * BLOCK + inside
    is_channel = channel < channels
    if UNITS > 0:
        is_unit = block < UNITS
        after = UNITS * HEAD + (block - UNITS) * BLOCK
        channel = tl.where(is_unit, block * HEAD, after) + inside
        is_channel = tl.where(is_unit, inside < HEAD, channel < channels)
    token = begin + tl.arange(0, COUNT)[:, None]
    live = (token < end) & is_channel[None, :]
    own_ptr = kernel_ptr + channel
    BEFORE: tl.constexpr = WIDTH - 1
    total = tl.zeros((COUNT, BLOCK), tl.float32)
    for i in tl.static_range(WIDTH):
        source = token - (BEFORE - i)
        x = _inputs(
            y_ptr, source, stride, channel[None, :], channels, live & (source >= first), GATED
        )
        weight = tl.load(own_ptr + i * channels, mask=is_channel, other=0.0).to(tl.float32)
        total += x.to(tl.float32) * weight[None, :]
    if begin < first + BEFORE:  # the first tokens' inputs are those before, too
        _, _, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
        for i in tl.static_range(BEFORE):
            row = token - (BEFORE - i)
            at = start + row - first
            is_old = live & (row < first) & (at >= 0)
            old_ptr = input_ptr + (read * ROWS + at % ROWS) * columns + channel[None, :]
            old = tl.load(old_ptr, mask=is_old, other=0.0).to(tl.float32)
            weight = tl.load(own_ptr + i * channels, mask=is_channel, other=0.0).to(tl.float32)
            total += old * weight[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if UNITS > 0:
        total = silu(total)
    out = total.to(out_ptr.dtype.element_ty)
    if UNITS > 0:
        x = out.to(tl.float32)
        unit = x * tl.rsqrt(tl.sum(x * x, 1) + _EPS)[:, None]
        out = tl.where(block < UNITS, unit, x).to(out_ptr.dtype.element_ty)
    if GATED:
        gate_ptr = y_ptr + token.to(tl.int64) * stride + channels + channel[None, :]
        out = out * tl.load(gate_ptr, mask=live, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * channels + channel[None, :], out, mask=live)


@triton.jit
def _remember_kernel(
    y_ptr,
    stride,
    input_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    kept_ptr,
    channels,
    columns,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Keep some channels of a prompt's last inputs, and of those of its snapshot."""
    request = tl.program_id(0)
    first, count, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if count <= MOST:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep, kept = snapshot_of(request, start, start + count, keep_ptr, kept_ptr)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = channel < channels
    if kept > 0:
        x = taps_of(y_ptr, stride, input_ptr, columns, channel, channels, live, kept - 1, first,
                    start, read, ROWS, WIDTH, GATED)  # fmt: skip
        remember(x, input_ptr, columns, channel, live, kept - 1, keep, True, ROWS, WIDTH)
    last = start + count - 1
    x = taps_of(y_ptr, stride, input_ptr, columns, channel, channels, live, last, first, start,
                read, ROWS, WIDTH, GATED)  # fmt: skip
    remember(x, input_ptr, columns, channel, live, last, write, True, ROWS, WIDTH)
