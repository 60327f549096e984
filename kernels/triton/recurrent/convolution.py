"""Short convolutions, whose windows of inputs are the state of a request.

Definition: `toolkit.kernels.recurrent.short_convolution`."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.recurrent import CHUNK

from ..pdl import release, supported, wait
from .step import RecurrentStep

CHANNELS_EACH = 64  # channels of a program


def gated_convolution(
    y: Tensor, kernel: Tensor, bias: Tensor | None, windows: Tensor, step: RecurrentStep
) -> Tensor:
    """Return c · (convolution of b · x), [num_tokens, channels]. y: [num_tokens, b | c | x].

    kernel: [channels, width]; windows: [slots, width - 1, channels] in y's type."""
    channels, width = kernel.shape
    out = torch.empty(len(y), channels, dtype=y.dtype, device=y.device)
    if step.has_prompts:
        convolve_prompts(y, out, kernel, bias, windows, step, is_gated=True)
    pdl = supported(y.device)
    _convolution_step_kernel[(step.num_reqs, -(-channels // CHANNELS_EACH))](
        y,
        y.stride(0),
        out,
        kernel,
        bias,
        windows,
        step.starts,
        step.lengths,
        step.reads,
        step.writes,
        step.keeps,
        channels,
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
    windows: Tensor,
    step: RecurrentStep,
    *,
    is_gated: bool = False,
    has_silu: bool = False,
) -> None:
    """Convolve the first channels of y for requests with more than one token.

    is_gated: as in `gated_convolution`. out: [num_tokens, channels]."""
    channels, width = kernel.shape
    blocks = -(-channels // CHANNELS_EACH)
    _convolve_kernel[(step.max_chunks, blocks)](
        y,
        y.stride(0),
        out,
        kernel,
        bias,
        windows,
        step.chunks,
        step.starts,
        step.lengths,
        step.reads,
        channels,
        WIDTH=width,
        BLOCK=CHANNELS_EACH,
        CHUNK=CHUNK,
        GATED=is_gated,
        SILU=has_silu,
        num_warps=4,
    )
    _window_kernel[(step.num_reqs, blocks)](
        y,
        y.stride(0),
        windows,
        step.starts,
        step.lengths,
        step.reads,
        step.writes,
        step.keeps,
        step.after,
        channels,
        WIDTH=width,
        BLOCK=CHANNELS_EACH,
        GATED=is_gated,
        num_warps=1,
    )


@triton.jit
def tokens_of(request, start_ptr, length_ptr, read_ptr):
    """Return (first token, number of tokens, whether it begins here, slot to read) of a request."""
    first = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - first
    is_first = tl.load(length_ptr + request) <= count
    return first, count, is_first, tl.load(read_ptr + request).to(tl.int64)


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
def convolve_one(
    x, channel, live, kernel_ptr, window_ptr, channels, is_first, read, write, keep,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the convolution of one token's channels in fp32, and replace their window.

    Threads may hold copies of the same channels: all read before the first one writes."""
    BEFORE: tl.constexpr = WIDTH - 1
    old_ptr = window_ptr + read * BEFORE * channels + channel
    new_ptr = window_ptr + write * BEFORE * channels + channel
    kept_ptr = window_ptr + keep * BEFORE * channels + channel
    kernel_ptr += channel * WIDTH
    is_old, is_kept = live & (is_first == 0), live & (keep >= 0)
    total = x.to(tl.float32) * tl.load(kernel_ptr + BEFORE, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(BEFORE):
        old = tl.load(old_ptr + i * channels, mask=is_old, other=0.0)
        weight = tl.load(kernel_ptr + i, mask=live, other=0.0).to(tl.float32)
        total += old.to(tl.float32) * weight
    tl.debug_barrier()
    for i in tl.static_range(1, BEFORE):
        old = tl.load(old_ptr + i * channels, mask=is_old, other=0.0)
        tl.store(new_ptr + (i - 1) * channels, old, mask=live)
        tl.store(kept_ptr + (i - 1) * channels, old, mask=is_kept)
    if BEFORE > 0:
        tl.store(new_ptr + (BEFORE - 1) * channels, x, mask=live)
        tl.store(kept_ptr + (BEFORE - 1) * channels, x, mask=is_kept)
    return total


@triton.jit
def _convolution_step_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    bias_ptr,
    window_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some channels of one token."""
    wait(PDL)
    release(PDL)
    request = tl.program_id(0)
    token, count, is_first, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if count != 1:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep = tl.load(keep_ptr + request).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    x = _inputs(y_ptr, token, stride, channel, channels, live, True)
    total = convolve_one(
        x, channel, live, kernel_ptr, window_ptr, channels, is_first, read, write, keep, WIDTH
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
    gate_ptr = y_ptr + token.to(tl.int64) * stride + channels + channel
    gate = tl.load(gate_ptr, mask=live, other=0.0)
    own = out_ptr + token.to(tl.int64) * channels + channel
    tl.store(own, gate * total.to(x.dtype), mask=live)


@triton.jit
def _convolve_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    bias_ptr,
    window_ptr,
    chunk_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
):
    """Convolve some channels of a chunk."""
    chunk = tl.program_id(0) * 3
    begin, end = tl.load(chunk_ptr + chunk), tl.load(chunk_ptr + chunk + 1)
    if begin == end:
        return
    request = tl.load(chunk_ptr + chunk + 2)
    first, _, is_first, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = begin + tl.arange(0, CHUNK)[:, None]
    is_channel = (channel < channels)[None, :]
    live = (token < end) & is_channel
    BEFORE: tl.constexpr = WIDTH - 1
    old_ptr = window_ptr + read * BEFORE * channels + channel[None, :]
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    for i in tl.static_range(WIDTH):
        source = token - (BEFORE - i)
        x = _inputs(
            y_ptr, source, stride, channel[None, :], channels, live & (source >= first), GATED
        )
        row = source - first + BEFORE  # of the window
        is_old = live & (source < first) & (is_first == 0)
        old = tl.load(old_ptr + row * channels, mask=is_old, other=0.0)
        weight = tl.load(kernel_ptr + channel * WIDTH + i, mask=channel < channels, other=0.0)
        total += (x.to(tl.float32) + old.to(tl.float32)) * weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if SILU:
        total = silu(total)
    out = total.to(out_ptr.dtype.element_ty)
    if GATED:
        gate_ptr = y_ptr + token.to(tl.int64) * stride + channels + channel[None, :]
        out = out * tl.load(gate_ptr, mask=live, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * channels + channel[None, :], out, mask=live)


@triton.jit
def _window_kernel(
    y_ptr,
    stride,
    window_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    after_ptr,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write some channels of a request's window, and of its snapshot."""
    request = tl.program_id(0)
    first, length, is_first, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if length <= 1:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep = tl.load(keep_ptr + request).to(tl.int64)
    after = tl.load(after_ptr + request)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    BEFORE: tl.constexpr = WIDTH - 1
    # A row reads the old rows that follow it, which are replaced later.
    is_kept = live & (keep >= 0)
    for i in tl.static_range(BEFORE):
        x = _row_after(
            y_ptr, stride, window_ptr, channel, channels, is_kept, is_first, read, first, after, i,
            WIDTH, GATED,
        )  # fmt: skip
        kept_ptr = window_ptr + (keep * BEFORE + i) * channels + channel
        tl.store(kept_ptr, x, mask=is_kept)
    for i in tl.static_range(BEFORE):
        x = _row_after(
            y_ptr, stride, window_ptr, channel, channels, live, is_first, read, first, length, i,
            WIDTH, GATED,
        )  # fmt: skip
        tl.store(window_ptr + (write * BEFORE + i) * channels + channel, x, mask=live)


@triton.jit
def _row_after(
    y_ptr, stride, window_ptr, channel, channels, live, is_first, read, first, count, i,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Return row `i` of the window after `count` tokens."""
    BEFORE: tl.constexpr = WIDTH - 1
    at = count - BEFORE + i
    x = _inputs(y_ptr, first + at, stride, channel, channels, live & (at >= 0), GATED)
    old_ptr = window_ptr + (read * BEFORE + BEFORE + at) * channels + channel
    old = tl.load(old_ptr, mask=live & (at < 0) & (is_first == 0), other=0.0)
    return x + old
