"""Gated delta nets.

Requests that decode or verify drafts, and those that compute prompts, are computed by different
kernels, which read on the device how many tokens each has: a prompt may end with one token, too.
Each kernel leaves the other requests alone. The former: one kernel for the layer, which reads and
writes each state once.

Prompts: tokens are cut into chunks of CHUNK, one of which ends where a request's snapshot does.
Within a chunk, updates solve a triangular system (`_solve_kernel`, `_reads_kernel`, all chunks side
by side). States then pass from chunk to chunk (`_scan_kernel`), a few columns in each program.

Definition: `toolkit.kernels.recurrent.delta_net`."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.recurrent import CHUNK, EPS

from ..pdl import release, supported, wait
from ..sizes import power_of_two
from .convolution import convolve_prompts, remember, silu, taps_of
from .step import RecurrentStep, drafts_of, snapshot_of, tokens_of

VALUES_VERIFIED = 64  # columns of a state that a program updates together
VALUES_EACH = 32, 64  # columns of a state that a program passes from chunk to chunk: few, or many
MANY_PROGRAMS = 256  # with many columns each
_STAGE_BYTES = 60 << 10  # of `_scan_kernel`'s shared memory, with heads of 128
_TILE = tl.constexpr(16)  # rows of a system that are solved one by one
_EPS = tl.constexpr(EPS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class DeltaNet:
    """A layer: `recurrent.delta_net`, which has the arguments.

    a_log, time: fp32; inputs: in the type of the rows."""

    def __init__(
        self,
        kernel: Tensor,
        a_log: Tensor,
        time: Tensor,
        norm: Tensor,
        eps: float,
        rate: float,
        inputs: Tensor,
        states: Tensor,
        num_k_heads: int,
    ) -> None:
        self._kernel, self._gates, self._norm = kernel.T.contiguous(), (a_log, time), norm
        self._eps, self._rate = eps, rate
        self._inputs, self._states = inputs, states
        _, self._v_heads, self._k_size, self._v_size = states.shape
        self._k_heads = num_k_heads
        self._width, self._channels = self._kernel.shape
        self._block = power_of_two(self._v_size)
        self._sizes = {
            "K_HEADS": num_k_heads,
            "GROUP": self._v_heads // num_k_heads,
            "K_SIZE": self._k_size,
            "V_SIZE": self._v_size,
            "K_BLOCK": max(16, power_of_two(self._k_size)),
        }

    def __call__(self, y: Tensor, step: RecurrentStep) -> Tensor:
        """Return [num_tokens, v_heads · v_size]. y: [num_tokens, q | k | v | z | b | a]."""
        out = torch.empty(len(y), self._v_heads * self._v_size, dtype=y.dtype, device=y.device)
        if step.has_prompts:
            self._compute_prompts(y, step, out)
        pdl = supported(y.device)
        places = {"ROWS": self._inputs.shape[1], "WIDTH": self._width}
        sizes = self._sizes | {"RATE": self._rate} | places
        weights = self._kernel, *self._gates, self._norm, self._eps
        given = y, y.stride(0), out, *weights, self._inputs, self._states, *step.requests
        grid = step.num_reqs, self._v_heads
        if step.most_verified == 1:
            warps = 4 if self._block <= 128 else 8
            block = {"V_BLOCK": self._block}
            _delta_step_kernel[grid](
                *given, **sizes, **block, PDL=pdl, num_warps=warps, launch_pdl=pdl
            )
            return out
        most = 2 * step.most_verified - 1 + self._width - 1
        count, is_exact = max(16, power_of_two(most)), y.dtype == torch.float32
        # What fits into registers and shared memory.
        values = VALUES_VERIFIED // 2 if is_exact and count < 64 else VALUES_VERIFIED
        _verify_kernel[grid](
            *given,
            *step.drafts,
            **sizes,
            V_BLOCK=min(max(16, self._block), values),
            MOST=step.most_verified,
            NORM_BLOCK=self._block,
            COUNT=count,
            EXACT=is_exact,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4 if is_exact or count == 16 else 8,
            num_stages=1,
        )
        return out

    def _compute_prompts(self, y: Tensor, step: RecurrentStep, out: Tensor) -> None:
        """Compute the requests with prompts."""
        mixed = torch.empty(len(y), self._channels, dtype=y.dtype, device=y.device)
        units = 2 * self._k_heads
        weights = self._kernel, None, self._inputs
        convolve_prompts(y, mixed, *weights, step, units=units, head=self._k_size)
        chunks, heads = step.max_chunks, self._v_heads
        totals = torch.empty(chunks, heads, CHUNK, dtype=torch.float32, device=y.device)
        systems = torch.empty(2, chunks, heads, CHUNK, CHUNK, dtype=y.dtype, device=y.device)
        updates, reads = systems
        is_exact = y.dtype == torch.float32
        sizes = self._sizes | {"CHUNK": CHUNK, "EXACT": is_exact}
        _solve_kernel[(chunks, heads)](
            mixed,
            y,
            y.stride(0),
            *self._gates,
            updates,
            totals,
            step.chunks,
            **sizes,
            RATE=self._rate,
            num_warps=1,
        )
        _reads_kernel[(chunks, heads)](mixed, totals, reads, step.chunks, **sizes, num_warps=4)
        few, many = VALUES_EACH
        is_many = step.num_reqs * heads * -(-self._v_size // many) >= MANY_PROGRAMS
        block = min(many if is_many and not is_exact else few, max(16, self._block))
        _scan_kernel[(step.num_reqs, heads, -(-self._v_size // block))](
            mixed,
            totals,
            updates,
            reads,
            out,
            self._states,
            step.chunk_starts,
            *step.requests[:5],
            step.after,
            **sizes,
            V_BLOCK=block,
            MOST=step.most_verified,
            num_warps=4,
            num_stages=1 if is_exact else min(_scan_stages(y.device), 2 if block > few else 3),
        )
        _gated_norm_kernel[(chunks, heads)](
            out,
            y,
            y.stride(0),
            self._channels,
            self._norm,
            self._eps,
            step.chunks,
            V_HEADS=heads,
            V_SIZE=self._v_size,
            V_BLOCK=self._block,
            CHUNK=CHUNK,
            num_warps=8,
        )


@functools.cache
def _scan_stages(device: torch.device) -> int:
    """Return in how many stages `_scan_kernel` loads: the GPU's shared memory limits them.

    One would read beyond its shared memory on Hopper, as Triton compiles it."""
    if device.type != "cuda":
        return 1
    size = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return 3 if size >= 3 * _STAGE_BYTES else 2 if size >= 2 * _STAGE_BYTES else 1


@triton.jit
def _delta_step_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    decay_ptr,
    time_ptr,
    norm_ptr,
    eps,
    input_ptr,
    state_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    kept_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RATE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a head of values of a request with one token.

    Programs that share keys read the inputs that they have in common. None is replaced meanwhile: a
    new token's are kept in a row that no token before needs."""
    request, head = tl.program_id(0), tl.program_id(1)
    first, count, position, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    is_one = count == 1
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    COLUMNS: tl.constexpr = CHANNELS + 2 * V_HEADS
    MATRIX: tl.constexpr = K_SIZE * V_SIZE
    SLOT: tl.constexpr = V_HEADS * MATRIX
    key, value = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    is_value = value < V_SIZE
    inside = head * MATRIX + key[:, None] * V_SIZE + value[None, :]
    live = (key < K_SIZE)[:, None] & is_value[None, :]
    state = tl.load(
        state_ptr + read * SLOT + inside, mask=live & is_one & (position > 0), other=0.0
    )
    state = state.to(tl.float32)
    write = tl.load(write_ptr + request).to(tl.int64)
    keep, kept = snapshot_of(request, position, position + 1, keep_ptr, kept_ptr)

    TAPS: tl.constexpr = triton.next_power_of_2(WIDTH)
    tap = tl.arange(0, TAPS)[:, None]
    q_channel = (head // GROUP * K_SIZE + key)[None, :]
    v_channel = (2 * KEYS + head * V_SIZE + value)[None, :]
    q_live, v_live = (key < K_SIZE)[None, :], is_value[None, :]
    own_ptr = kernel_ptr + tap * CHANNELS
    q_mask, v_mask = q_live & (tap < WIDTH), v_live & (tap < WIDTH)
    q_weights = tl.load(own_ptr + q_channel, mask=q_mask, other=0.0).to(tl.float32)
    k_weights = tl.load(own_ptr + KEYS + q_channel, mask=q_mask, other=0.0).to(tl.float32)
    v_weights = tl.load(own_ptr + v_channel, mask=v_mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    a_log, time = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    wait(PDL)
    release(PDL)
    if count != 1:
        return
    token = first.to(tl.int64)
    row_ptr = y_ptr + token * stride
    gate_ptr = row_ptr + CHANNELS + VALUES + head
    b, a = tl.load(gate_ptr), tl.load(gate_ptr + V_HEADS)
    q_taps = taps_of(y_ptr, stride, input_ptr, COLUMNS, q_channel, 0, q_live, position, first,
                     position, read, ROWS, WIDTH, False)  # fmt: skip
    k_taps = taps_of(y_ptr, stride, input_ptr, COLUMNS, KEYS + q_channel, 0, q_live, position,
                     first, position, read, ROWS, WIDTH, False)  # fmt: skip
    v_taps = taps_of(y_ptr, stride, input_ptr, COLUMNS, v_channel, 0, v_live, position, first,
                     position, read, ROWS, WIDTH, False)  # fmt: skip
    dtype = q_taps.dtype
    q = silu(tl.sum(q_taps.to(tl.float32) * q_weights, 0)).to(dtype).to(tl.float32)
    k = silu(tl.sum(k_taps.to(tl.float32) * k_weights, 0)).to(dtype).to(tl.float32)
    v = silu(tl.sum(v_taps.to(tl.float32) * v_weights, 0)).to(dtype).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + _EPS) * (K_SIZE**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + _EPS)
    decay = _decay(a.to(tl.float32), a_log, time)
    decay = tl.exp(decay)
    beta = RATE * tl.sigmoid(b.to(tl.float32))
    update = (v - decay * tl.sum(state * k[:, None], 0)) * beta
    # The new state reads a query as the old one does, plus what the update adds.
    out = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * update
    state = decay * state + k[:, None] * update[None, :]
    after = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + write * SLOT + inside, after, mask=live)

    out = out.to(dtype).to(tl.float32)
    place = head * V_SIZE + value
    z = tl.load(row_ptr + CHANNELS + place, mask=is_value, other=0.0).to(tl.float32)
    unit = (out * tl.rsqrt(tl.sum(out * out, 0) / V_SIZE + eps)).to(dtype)
    out = norm * unit.to(tl.float32) * silu(z)
    tl.store(out_ptr + token * VALUES + place, out.to(dtype), mask=is_value)
    q_live &= head % GROUP == 0
    moves = read != write
    remember(q_taps, input_ptr, COLUMNS, q_channel, q_live, position, write, moves, ROWS, WIDTH)
    remember(k_taps, input_ptr, COLUMNS, KEYS + q_channel, q_live, position, write, moves, ROWS,
             WIDTH)  # fmt: skip
    remember(v_taps, input_ptr, COLUMNS, v_channel, v_live, position, write, moves, ROWS, WIDTH)
    if kept > 0:
        tl.store(state_ptr + keep * SLOT + inside, after, mask=live)
        remember(q_taps, input_ptr, COLUMNS, q_channel, q_live, position, keep, True, ROWS, WIDTH)
        remember(k_taps, input_ptr, COLUMNS, KEYS + q_channel, q_live, position, keep, True, ROWS,
                 WIDTH)  # fmt: skip
        remember(v_taps, input_ptr, COLUMNS, v_channel, v_live, position, keep, True, ROWS, WIDTH)


@triton.jit
def _verify_kernel(
    y_ptr,
    stride,
    out_ptr,
    kernel_ptr,
    decay_ptr,
    time_ptr,
    norm_ptr,
    eps,
    input_ptr,
    state_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    kept_ptr,
    begin_ptr,
    written_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RATE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
    MOST: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute a head of values of a request that may have drafts, in this step or the one before.

    Its tokens and those drafts that were accepted are a chunk, as in a prompt, after the rows of
    the inputs before: [COUNT] rows."""
    wait(PDL)
    release(PDL)
    request, head = tl.program_id(0), tl.program_id(1)
    first, count, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if (count < 1) | (count > MOST):
        return
    end = start + count
    begin, written = drafts_of(request, start, end, begin_ptr, written_ptr)
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    COLUMNS: tl.constexpr = CHANNELS + 2 * V_HEADS
    MATRIX: tl.constexpr = K_SIZE * V_SIZE
    SLOT: tl.constexpr = V_HEADS * MATRIX
    BEFORE: tl.constexpr = WIDTH - 1
    key = tl.arange(0, K_BLOCK)
    is_key = key < K_SIZE
    write = tl.load(write_ptr + request).to(tl.int64)
    keep, kept = snapshot_of(request, begin, written, keep_ptr, kept_ptr)

    row = tl.arange(0, COUNT)
    position = begin - BEFORE + row
    is_token = (row >= BEFORE) & (position < end)
    is_new = is_token & (position >= start)
    q_channel = head // GROUP * K_SIZE + key
    q, q_input = _convolved(
        y_ptr, stride, input_ptr, kernel_ptr, q_channel, is_key, position, is_token, first, start,
        end, read, CHANNELS, COLUMNS, ROWS, WIDTH,
    )  # fmt: skip
    k, k_input = _convolved(
        y_ptr, stride, input_ptr, kernel_ptr, KEYS + q_channel, is_key, position, is_token, first,
        start, end, read, CHANNELS, COLUMNS, ROWS, WIDTH,
    )  # fmt: skip
    dtype = q_input.dtype
    q = (q * tl.rsqrt(tl.sum(q * q, 1) + _EPS)[:, None]).to(dtype)
    k = (k * tl.rsqrt(tl.sum(k * k, 1) + _EPS)[:, None]).to(dtype)
    token = (first + position - start).to(tl.int64)
    gate_ptr = y_ptr + token * stride + CHANNELS + VALUES + head
    old_ptr = input_ptr + (read * ROWS + position % ROWS) * COLUMNS + CHANNELS + head
    is_old = is_token & (position < start)
    b = tl.load(gate_ptr, mask=is_new, other=0.0) + tl.load(old_ptr, mask=is_old, other=0.0)
    a = tl.load(gate_ptr + V_HEADS, mask=is_new, other=0.0)
    a += tl.load(old_ptr + V_HEADS, mask=is_old, other=0.0)
    decay = _decay(a.to(tl.float32), tl.load(decay_ptr + head), tl.load(time_ptr + head))
    decay = tl.where(is_token, decay, 0.0)
    beta = tl.where(is_token, RATE * tl.sigmoid(b.to(tl.float32)), 0.0)

    total = tl.cumsum(decay, 0)
    is_before = row[:, None] > row[None, :]
    between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    system = beta[:, None] * between * _dot(k, tl.trans(k), EXACT)
    system = tl.where(is_before, system, 0.0)
    inverse = -system
    for i in range(BEFORE + 2, BEFORE + end - begin):
        inverse = _next_row(system, inverse, i, COUNT)
    is_same = row[:, None] == row[None, :]
    inverse = (inverse + tl.where(is_same, 1.0, 0.0)) * beta[None, :]
    reads = _dot(q, tl.trans(k), EXACT) * between * (K_SIZE**-0.5)
    reads = tl.where(is_before | is_same, reads, 0.0)
    since = tl.exp(total)[:, None]
    is_late = (position >= 0) & (position >= written - BEFORE) & (position < end)
    is_late &= (position >= start) | (read != write)
    is_kept = (position >= 0) & (position >= kept - BEFORE) & (position < kept)
    own = (write * ROWS + position % ROWS) * COLUMNS
    kept_own = (keep * ROWS + position % ROWS) * COLUMNS
    squares = tl.zeros((COUNT,), tl.float32)
    for v_first in range(0, V_SIZE, V_BLOCK):
        value = v_first + tl.arange(0, V_BLOCK)
        is_value = value < V_SIZE
        inside = head * MATRIX + key[:, None] * V_SIZE + value[None, :]
        live = is_key[:, None] & is_value[None, :]
        state = tl.load(state_ptr + read * SLOT + inside, mask=live & (begin > 0), other=0.0)
        state = state.to(tl.float32)
        v_channel = 2 * KEYS + head * V_SIZE + value
        v, v_input = _convolved(
            y_ptr, stride, input_ptr, kernel_ptr, v_channel, is_value, position, is_token, first,
            start, end, read, CHANNELS, COLUMNS, ROWS, WIDTH,
        )  # fmt: skip
        rounded = state.to(dtype)
        wanted = (v - _dot(k, rounded, EXACT) * since).to(dtype)
        update = _dot(inverse.to(dtype), wanted, EXACT)
        out = _dot(q, rounded, EXACT) * (since * (K_SIZE**-0.5))
        out += _dot(reads.to(dtype), update.to(dtype), EXACT)
        after = _state_after(state, k, update, total, position, written, EXACT)
        after = after.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + write * SLOT + inside, after, mask=live)
        v_live, v_ptr = is_value[None, :], input_ptr + v_channel[None, :]
        tl.store(v_ptr + own[:, None], v_input, mask=v_live & is_late[:, None])
        if kept > 0:
            after = _state_after(state, k, update, total, position, kept, EXACT)
            after = after.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + keep * SLOT + inside, after, mask=live)
            tl.store(v_ptr + kept_own[:, None], v_input, mask=v_live & is_kept[:, None])
        out = out.to(dtype)
        out_row = out_ptr + token[:, None] * VALUES + head * V_SIZE + value[None, :]
        tl.store(out_row, out, mask=is_new[:, None] & v_live)
        squares += tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)

    q_live = (is_key & (head % GROUP == 0))[None, :]
    q_ptr = input_ptr + q_channel[None, :]
    tl.store(q_ptr + own[:, None], q_input, mask=q_live & is_late[:, None])
    tl.store(q_ptr + own[:, None] + KEYS, k_input, mask=q_live & is_late[:, None])
    own_ptr = input_ptr + own + CHANNELS + head
    tl.store(own_ptr, b, mask=is_late & is_token)
    tl.store(own_ptr + V_HEADS, a, mask=is_late & is_token)
    if kept > 0:
        tl.store(q_ptr + kept_own[:, None], q_input, mask=q_live & is_kept[:, None])
        tl.store(q_ptr + kept_own[:, None] + KEYS, k_input, mask=q_live & is_kept[:, None])

    tl.debug_barrier()  # outputs are read by other threads
    value = tl.arange(0, NORM_BLOCK)
    is_value = value < V_SIZE
    is_out = is_new[:, None] & is_value[None, :]
    place = head * V_SIZE + value[None, :]
    out_row = out_ptr + token[:, None] * VALUES + place
    out = tl.load(out_row, mask=is_out, other=0.0).to(tl.float32)
    z_ptr = y_ptr + token[:, None] * stride + CHANNELS + place
    z = tl.load(z_ptr, mask=is_out, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    unit = (out * tl.rsqrt(squares / V_SIZE + eps)[:, None]).to(dtype)
    out = norm[None, :] * unit.to(tl.float32) * silu(z)
    tl.store(out_row, out.to(dtype), mask=is_out)


@triton.jit
def _convolved(
    y_ptr, stride, input_ptr, kernel_ptr, channel, live, position, is_token, first, start, end,
    read,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return silu of the convolutions of tokens, rounded, in fp32, and the inputs of positions."""
    total = tl.zeros((position.shape[0], channel.shape[0]), tl.float32)
    for i in tl.static_range(WIDTH):
        at = position - (WIDTH - 1) + i
        is_wanted = (at >= 0) & (at < end)
        if i < WIDTH - 1:
            is_wanted &= is_token
        row = (first + at - start).to(tl.int64)
        new_ptr = y_ptr + row[:, None] * stride + channel[None, :]
        x = tl.load(new_ptr, mask=(is_wanted & (at >= start))[:, None] & live[None, :], other=0.0)
        row = (read * ROWS + at % ROWS) * COLUMNS
        old_ptr = input_ptr + row[:, None] + channel[None, :]
        x += tl.load(old_ptr, mask=(is_wanted & (at < start))[:, None] & live[None, :], other=0.0)
        weight = tl.load(kernel_ptr + i * CHANNELS + channel, mask=live, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    y = tl.where(is_token[:, None], silu(total), 0.0)
    return y.to(x.dtype).to(tl.float32), x


@triton.jit
def _state_after(state, k, update, total, position, end, EXACT: tl.constexpr):
    """Return the state after the tokens before position `end`."""
    is_there = position < end
    least = tl.min(tl.where(is_there, total, 0.0), 0)  # decays add up
    left = update * tl.where(is_there, tl.exp(tl.minimum(least - total, 0.0)), 0.0)[:, None]
    return state * tl.exp(least) + _dot(tl.trans(k), left.to(k.dtype), EXACT)


@triton.jit
def _solve_kernel(
    mixed_ptr,
    y_ptr,
    stride,
    decay_ptr,
    time_ptr,
    update_ptr,
    total_ptr,
    chunk_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    RATE: tl.constexpr,
):
    """Solve the system of a chunk and a head of values, which does not depend on the state.

    Writes a matrix [CHUNK, CHUNK], by which updates are made of what values add to what keys stood
    for (zeros above its diagonal are not written), and the sums of decays [CHUNK]. The system is
    cut into four rows of tiles. Those on the diagonal are inverted row by row, the others follow:
    as exact as in fp32, since updates of like keys would lose much more with tf32."""
    tl.static_assert(CHUNK == 4 * _TILE)
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 4), tl.load(chunk_ptr + chunk * 4 + 1)
    if begin == end:
        return
    gate_ptr = y_ptr + 2 * K_HEADS * K_SIZE + 2 * V_HEADS * V_SIZE + head
    a_log, time = tl.load(decay_ptr + head), tl.load(time_ptr + head)
    d0, b0 = _gates(gate_ptr, stride, a_log, time, begin, end, V_HEADS, RATE)
    d1, b1 = _gates(gate_ptr, stride, a_log, time, begin + 16, end, V_HEADS, RATE)
    d2, b2 = _gates(gate_ptr, stride, a_log, time, begin + 32, end, V_HEADS, RATE)
    d3, b3 = _gates(gate_ptr, stride, a_log, time, begin + 48, end, V_HEADS, RATE)
    t0 = tl.cumsum(d0, 0)
    t1 = tl.cumsum(d1, 0) + tl.sum(d0, 0)
    t2 = tl.cumsum(d2, 0) + (tl.sum(d0, 0) + tl.sum(d1, 0))
    t3 = tl.cumsum(d3, 0) + (tl.sum(d0, 0) + tl.sum(d1, 0) + tl.sum(d2, 0))
    row = tl.arange(0, _TILE)
    own_ptr = total_ptr + (chunk.to(tl.int64) * V_HEADS + head) * CHUNK + row
    tl.store(own_ptr, t0)
    tl.store(own_ptr + 16, t1)
    tl.store(own_ptr + 32, t2)
    tl.store(own_ptr + 48, t3)

    is_before = row[:, None] > row[None, :]
    s0 = _system(0, 0, t0, t0, b0, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s1 = _system(1, 1, t1, t1, b1, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s2 = _system(2, 2, t2, t2, b2, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s3 = _system(3, 3, t3, t3, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s0, s1 = tl.where(is_before, s0, 0.0), tl.where(is_before, s1, 0.0)
    s2, s3 = tl.where(is_before, s2, 0.0), tl.where(is_before, s3, 0.0)
    x0, x1, x2, x3 = -s0, -s1, -s2, -s3
    for i in range(2, _TILE):
        x0, x1 = _next_row(s0, x0, i, _TILE), _next_row(s1, x1, i, _TILE)
        x2, x3 = _next_row(s2, x2, i, _TILE), _next_row(s3, x3, i, _TILE)
    one = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    x0, x1, x2, x3 = x0 + one, x1 + one, x2 + one, x3 + one
    s10 = _system(1, 0, t1, t0, b1, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s21 = _system(2, 1, t2, t1, b2, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s32 = _system(3, 2, t3, t2, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s20 = _system(2, 0, t2, t0, b2, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s31 = _system(3, 1, t3, t1, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    s30 = _system(3, 0, t3, t0, b3, mixed_ptr, begin, end, head, K_HEADS, GROUP, K_SIZE,
                  V_SIZE, K_BLOCK, EXACT)  # fmt: skip
    x10 = -_dot(x1, _dot(s10, x0, True), True)
    x21 = -_dot(x2, _dot(s21, x1, True), True)
    x32 = -_dot(x3, _dot(s32, x2, True), True)
    x20 = -_dot(x2, _dot(s20, x0, True) + _dot(s21, x10, True), True)
    x31 = -_dot(x3, _dot(s31, x1, True) + _dot(s32, x21, True), True)
    x30 = -_dot(
        x3,
        _dot(s30, x0, True) + _dot(s31, x10, True) + _dot(s32, x20, True),
        EXACT,
    )

    dtype = update_ptr.dtype.element_ty
    own_ptr = update_ptr + (chunk.to(tl.int64) * V_HEADS + head) * (CHUNK * CHUNK)
    own_ptr += row[:, None] * CHUNK + row[None, :]
    LINE: tl.constexpr = _TILE * CHUNK  # a row of tiles
    tl.store(own_ptr, (x0 * b0[None, :]).to(dtype))
    tl.store(own_ptr + LINE, (x10 * b0[None, :]).to(dtype))
    tl.store(own_ptr + LINE + 16, (x1 * b1[None, :]).to(dtype))
    tl.store(own_ptr + 2 * LINE, (x20 * b0[None, :]).to(dtype))
    tl.store(own_ptr + 2 * LINE + 16, (x21 * b1[None, :]).to(dtype))
    tl.store(own_ptr + 2 * LINE + 32, (x2 * b2[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE, (x30 * b0[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE + 16, (x31 * b1[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE + 32, (x32 * b2[None, :]).to(dtype))
    tl.store(own_ptr + 3 * LINE + 48, (x3 * b3[None, :]).to(dtype))


@triton.jit
def _system(
    tile, other, total, other_total, beta, mixed_ptr, begin, end, head,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return how much of the updates of other tokens the updates of a tile's tokens take back."""
    tl.debug_barrier()  # keys are loaded again: those of all tiles do not fit into registers
    column = (K_HEADS + head // GROUP) * K_SIZE
    k = _rows(mixed_ptr, begin + tile * _TILE, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE,
              K_BLOCK, _TILE)  # fmt: skip
    other_k = _rows(mixed_ptr, begin + other * _TILE, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE,
                    K_BLOCK, _TILE)  # fmt: skip
    between = tl.exp(tl.minimum(total[:, None] - other_total[None, :], 0.0))
    return beta[:, None] * between * _dot(k, tl.trans(other_k), EXACT)


@triton.jit
def _next_row(system, inverse, i, COUNT: tl.constexpr):
    """Solve row `i` of (1 + system)⁻¹ - 1, once those above it are solved."""
    is_row = (tl.arange(0, COUNT) == i)[:, None]
    line = -tl.sum(tl.where(is_row, system, 0.0), 0)
    line += tl.sum(line[:, None] * inverse, 0)
    return tl.where(is_row, line[None, :], inverse)


@triton.jit
def _reads_kernel(
    mixed_ptr,
    total_ptr,
    read_ptr,
    chunk_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write what each query of a chunk reads of each update, [CHUNK, CHUNK]."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 4), tl.load(chunk_ptr + chunk * 4 + 1)
    if begin == end:
        return
    column = head // GROUP * K_SIZE
    q = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
    column += K_HEADS * K_SIZE
    k = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
    row = tl.arange(0, CHUNK)
    own = chunk.to(tl.int64) * V_HEADS + head
    total = tl.load(total_ptr + own * CHUNK + row)
    is_known = row[:, None] >= row[None, :]
    between = tl.exp(tl.where(is_known, total[:, None] - total[None, :], float("-inf")))
    reads = _dot(q, tl.trans(k), EXACT) * between * (K_SIZE**-0.5)
    square = row[:, None] * CHUNK + row[None, :]
    tl.store(read_ptr + own * (CHUNK * CHUNK) + square, reads.to(read_ptr.dtype.element_ty))


@triton.jit
def _scan_kernel(
    mixed_ptr,
    total_ptr,
    update_ptr,
    from_update_ptr,
    out_ptr,
    state_ptr,
    chunk_start_ptr,
    start_ptr,
    length_ptr,
    read_ptr,
    write_ptr,
    keep_ptr,
    after_ptr,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    V_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Compute some columns of a head's state, of all chunks of a request."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    KEYS: tl.constexpr = K_HEADS * K_SIZE
    VALUES: tl.constexpr = V_HEADS * V_SIZE
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    request, head = tl.program_id(0), tl.program_id(1)
    first, length, start, read = tokens_of(request, start_ptr, length_ptr, read_ptr)
    if length <= MOST:
        return
    write = tl.load(write_ptr + request).to(tl.int64)
    keep = tl.load(keep_ptr + request).to(tl.int64)
    after = tl.load(after_ptr + request)
    key = tl.arange(0, K_BLOCK)
    value = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_value = value < V_SIZE
    live = (key < K_SIZE)[:, None] & is_value[None, :]
    inside = head * (K_SIZE * V_SIZE) + key[:, None] * V_SIZE + value[None, :]
    SLOT: tl.constexpr = V_HEADS * K_SIZE * V_SIZE
    state = tl.load(state_ptr + read * SLOT + inside, mask=live & (start > 0), other=0.0)
    state = state.to(tl.float32)
    row = tl.arange(0, CHUNK)
    square = row[:, None] * CHUNK + row[None, :]
    is_lower = row[:, None] >= row[None, :] // _TILE * _TILE
    dtype = mixed_ptr.dtype.element_ty
    first_chunk = tl.load(chunk_start_ptr + request)
    num_before = tl.cdiv(after, CHUNK)  # chunks up to the snapshot
    for index in range(num_before + tl.cdiv(length - after, CHUNK)):
        is_before = index < num_before
        begin = tl.where(is_before, index * CHUNK, after + (index - num_before) * CHUNK)
        end = first + tl.minimum(begin + CHUNK, tl.where(is_before, after, length))
        begin += first
        token = begin + row
        is_token = token < end
        own = (first_chunk + index).to(tl.int64) * V_HEADS + head
        column = head // GROUP * K_SIZE
        q = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
        column += KEYS
        k = _rows(mixed_ptr, begin, end, column, K_HEADS, GROUP, K_SIZE, V_SIZE, K_BLOCK, CHUNK)
        total = tl.load(total_ptr + own * CHUNK + row)
        updates = tl.load(update_ptr + own * (CHUNK * CHUNK) + square, mask=is_lower, other=0.0)
        reads = tl.load(from_update_ptr + own * (CHUNK * CHUNK) + square)
        value_ptr = token.to(tl.int64)[:, None] * CHANNELS + 2 * KEYS + head * V_SIZE
        is_there = is_token[:, None] & is_value[None, :]
        v = tl.load(mixed_ptr + value_ptr + value[None, :], mask=is_there, other=0.0)
        since = tl.exp(total)[:, None]
        rounded = state.to(dtype)
        known = _dot(k, rounded, EXACT) * since
        wanted = (v.to(tl.float32) - known).to(dtype)
        update = _dot(updates, wanted, EXACT)
        out = _dot(q, rounded, EXACT) * (since * (K_SIZE**-0.5))
        out += _dot(reads, update.to(dtype), EXACT)
        place = token.to(tl.int64)[:, None] * VALUES + head * V_SIZE + value[None, :]
        tl.store(out_ptr + place, out.to(dtype), mask=is_there)
        # Decays of tokens beyond the end are zero, so that the least sum is the last.
        least = tl.min(total, 0)
        left = (update * tl.exp(least - total)[:, None]).to(dtype)
        state = state * tl.exp(least) + _dot(tl.trans(k), left, EXACT)
        if is_before & (index + 1 == num_before):
            kept = state.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + keep * SLOT + inside, kept, mask=live)
    tl.store(state_ptr + write * SLOT + inside, state.to(state_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gated_norm_kernel(
    out_ptr,
    y_ptr,
    stride,
    channels,
    norm_ptr,
    eps,
    chunk_ptr,
    V_HEADS: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Normalize and gate a head of a chunk's outputs."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunk_ptr + chunk * 4), tl.load(chunk_ptr + chunk * 4 + 1)
    if begin == end:
        return
    token = (begin + tl.arange(0, CHUNK)).to(tl.int64)[:, None]
    value = tl.arange(0, V_BLOCK)
    live = (token < end) & (value < V_SIZE)[None, :]
    column = head * V_SIZE + value
    own = out_ptr + token * (V_HEADS * V_SIZE) + column[None, :]
    x = tl.load(own, mask=live, other=0.0)
    z = tl.load(y_ptr + token * stride + channels + column[None, :], mask=live, other=0.0)
    norm = tl.load(norm_ptr + value, mask=value < V_SIZE, other=0.0).to(tl.float32)
    dtype = x.dtype
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / V_SIZE + eps)[:, None]
    x = norm[None, :] * x.to(dtype).to(tl.float32) * silu(z.to(tl.float32))
    tl.store(own, x.to(dtype), mask=live)


@triton.jit
def _rows(
    mixed_ptr, begin, end, column,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return queries or keys of tokens, which begin at a column, [COUNT, K_BLOCK]."""
    CHANNELS: tl.constexpr = K_HEADS * (2 * K_SIZE + GROUP * V_SIZE)
    token = begin + tl.arange(0, COUNT)
    key = tl.arange(0, K_BLOCK)
    own = mixed_ptr + token.to(tl.int64)[:, None] * CHANNELS + column + key[None, :]
    live = (token < end)[:, None] & (key < K_SIZE)[None, :]
    return tl.load(own, mask=live, other=0.0)


@triton.jit
def _gates(
    gate_ptr, stride, a_log, time, begin, end,
    V_HEADS: tl.constexpr,
    RATE: tl.constexpr,
):  # fmt: skip
    """Return the decays of tokens and their rates of updates, [TILE]."""
    token = begin + tl.arange(0, _TILE)
    live = token < end
    own = gate_ptr + token.to(tl.int64) * stride
    b = tl.load(own, mask=live, other=0.0).to(tl.float32)
    a = tl.load(own + V_HEADS, mask=live, other=0.0).to(tl.float32)
    decay = tl.where(live, _decay(a, a_log, time), 0.0)
    return decay, tl.where(live, RATE * tl.sigmoid(b), 0.0)


@triton.jit
def _decay(a, a_log, time):
    """Return the logarithm of a state's decay."""
    x = a + time
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    """Return a @ b in fp32. The interpreter multiplies bits of bf16, so they are widened."""
    if _INTERPRETED:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        out = tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")
    return out
