"""Gated delta nets.

Requests that decode or verify drafts, and those that compute prompts, are computed by different
kernels, which read on the device how many tokens each has: a prompt may end with one token, too.
Each kernel leaves the other requests alone. Decoding is one kernel for the layer, which reads and
writes each state once; `verify` and `chunks` have the others.

Definition: `toolkit.kernels.recurrent.delta_net`."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.recurrent import CHUNK

from ..pdl import release, supported, wait
from ..sizes import power_of_two
from .chunks import _gated_norm_kernel, _reads_kernel, _scan_kernel, _solve_kernel
from .convolution import convolve_prompts, remember, silu, taps_of
from .parts import UNIT_EPS, decay_of
from .step import RecurrentStep, snapshot_of, tokens_of
from .verify import _verify_kernel

VALUES_VERIFIED = 64  # columns of a state that a program updates together
VALUES_EACH = 32, 64  # columns of a state that a program passes from chunk to chunk: few, or many
MANY_PROGRAMS = 256  # with many columns each
_STAGE_BYTES = 60 << 10  # of `_scan_kernel`'s shared memory, with heads of 128


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
        sizes = self._sizes | {"RATE": self._rate, "ROWS": self._inputs.shape[1]}
        sizes |= {"WIDTH": self._width}
        weights = self._kernel, *self._gates, self._norm, self._eps
        given = y, y.stride(0), out, *weights, self._inputs, self._states, *step.requests
        grid = step.num_reqs, self._v_heads
        if step.most_verified == 1:
            warps = 4 if self._block <= 128 else 8
            _delta_step_kernel[grid](
                *given, **sizes, V_BLOCK=self._block, PDL=pdl, num_warps=warps, launch_pdl=pdl
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
    q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT_EPS) * (K_SIZE**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + UNIT_EPS)
    decay = decay_of(a.to(tl.float32), a_log, time)
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
