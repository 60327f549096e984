"""A step's inputs from the state on the device. The host sends a few numbers per request."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
REQUESTS = 128
CHUNK = 1024


def expand_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor, Tensor],
    adapters: tuple[Tensor, Tensor] | None = None,
    ahead: int = 0,
    shifts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute `reference.expand_inputs`. Slots are int64, everything else int32."""
    num_tokens = out[0].shape[0]
    _expand_kernel[(-(-num_tokens // TOKENS),)](
        rows,
        query_start_loc,
        seq_lens,
        token_ids,
        block_table,
        *out,
        *(adapters or (rows, rows)),
        *(shifts or (rows, rows)),
        rows.shape[0],
        num_tokens,
        token_ids.stride(0),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        ADAPTED=adapters is not None,
        AHEAD=ahead,
        SHIFTED=shifts is not None,
        TOKENS=TOKENS,
        REQUESTS=REQUESTS,
        num_warps=4,
    )


def copy_runs(target: Tensor, runs: Tensor, values: Tensor, longest: int) -> None:
    """Copy runs of values into rows of a table.

    target: int32 `[num_rows, width]`; runs: int32 `[num_runs, 4]`, each (row, column, offset in
    `values`, length), none longer than `longest`; values: int32."""
    _copy_runs_kernel[(runs.shape[0], -(-longest // CHUNK))](
        target, runs, values, target.stride(0), CHUNK=CHUNK, num_warps=4
    )


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _expand_kernel(
    row_ptr,
    query_start_ptr,
    seq_len_ptr,
    token_ptr,
    table_ptr,
    out_token_ptr,
    out_position_ptr,
    out_slot_ptr,
    adapter_ptr,
    out_adapter_ptr,
    shift_ptr,
    out_shifted_ptr,
    num_reqs,
    num_tokens,
    token_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ADAPTED: tl.constexpr,
    AHEAD: tl.constexpr,
    SHIFTED: tl.constexpr,
    TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Expand TOKENS packed tokens. A token's request is the number of requests ended before it."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    request = tl.zeros([TOKENS], tl.int32)
    for base in range(0, num_reqs, REQUESTS):
        other = base + tl.arange(0, REQUESTS)
        end = tl.load(query_start_ptr + other + 1, mask=other < num_reqs, other=2147483647)
        request += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
    live = request < num_reqs
    row = tl.load(row_ptr + request, mask=live, other=0).to(tl.int64)
    end = tl.load(query_start_ptr + request + 1, mask=live, other=0)
    seq_len = tl.load(seq_len_ptr + request, mask=live, other=0)
    position = tl.where(live, seq_len - (end - token), 0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    token_id = tl.load(token_ptr + row * token_stride + position + AHEAD, mask=live, other=0)
    stored = token < num_tokens
    tl.store(out_token_ptr + token, token_id, mask=stored)
    tl.store(out_position_ptr + token, position, mask=stored)
    tl.store(out_slot_ptr + token, slot, mask=stored)
    if ADAPTED:
        adapter = tl.load(adapter_ptr + request, mask=live, other=-1)
        tl.store(out_adapter_ptr + token, adapter, mask=stored)
    if SHIFTED:
        shift = tl.load(shift_ptr + row, mask=live, other=0)
        tl.store(out_shifted_ptr + token, position + shift, mask=stored)


@triton.jit
def _copy_runs_kernel(target_ptr, run_ptr, value_ptr, target_stride, CHUNK: tl.constexpr):
    run_ptr += tl.program_id(0) * 4
    row = tl.load(run_ptr).to(tl.int64)
    column = tl.load(run_ptr + 1)
    begin = tl.load(run_ptr + 2)
    length = tl.load(run_ptr + 3)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(value_ptr + begin + index, mask=index < length)
    tl.store(target_ptr + row * target_stride + column + index, value, mask=index < length)
