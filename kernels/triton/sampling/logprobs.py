"""Log-probabilities of chosen and likeliest tokens, as packed records.

One pass over the logits reduces blocks of WIDTH tokens. Then one program per row finds the
likeliest tokens one by one: it takes the greatest of the blocks' maxima, and reads that block again
for its next one. Their number is known when the kernel runs, so that no other number compiles
another."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import power_of_two
from .sampling import BLOCKS, LOG2_E, WIDTH, _from_key, _readable, _to_key, check_shape

LAST_TOKEN = tl.constexpr(0x7FFFFFFF)
NO_KEY = tl.constexpr(-(1 << 63))


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """Return records int32 `[n, 3 + 2 min(k, vocab)]` (`kernels.logprobs`).

    logits: `[n, vocab]`, fp32, fp16 or bf16, rows may be strided; token_ids: int32 `[n]`, the
    chosen tokens (0 if negative). Of equally likely tokens the first comes first. All values come
    from one formula in one kernel, so a token's value is bitwise the same in both places.

    Raises ValueError for logits whose last dimension is strided."""
    n, vocab = check_shape(logits)
    k = min(k, vocab)
    records = torch.empty(n, 3 + 2 * k, dtype=torch.int32, device=logits.device)
    if n == 0:
        return records
    num_blocks, readable = -(-vocab // WIDTH), _readable(logits)
    keys = torch.empty(n, num_blocks, dtype=torch.int64, device=logits.device)
    sums = torch.empty(2, n, num_blocks, dtype=torch.float32, device=logits.device)
    _blocks_kernel[(-(-num_blocks // BLOCKS), n)](
        logits,
        token_ids,
        keys,
        sums,
        logits.stride(0),
        vocab,
        readable,
        num_blocks,
        n * num_blocks,
        PADDED=readable != vocab,
        BLOCKS=BLOCKS,
        WIDTH=WIDTH,
        num_warps=4,
    )
    _records_kernel[(n,)](
        logits,
        token_ids,
        keys,
        sums,
        records,
        logits.stride(0),
        vocab,
        k,
        num_blocks,
        n * num_blocks,
        NUM_BLOCKS_PAD=power_of_two(num_blocks),
        WIDTH=WIDTH,
        num_warps=1,  # no step of the search waits for another warp
    )
    return records


@triton.jit
def _search_key(logits, tokens):
    """Return int64 numbers with the order of the logits; of equal ones the first is greatest."""
    return (_to_key(logits).to(tl.int64) << 32) + (tokens ^ LAST_TOKEN).to(tl.int64)


@triton.jit
def _logit_of(key):
    return _from_key((key >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["num_sums"], do_not_specialize_on_alignment=["token_ptr"])
def _blocks_kernel(
    logits_ptr,
    token_ptr,
    key_ptr,
    sum_ptr,
    logits_stride,
    vocab,
    readable,
    num_blocks,
    num_sums,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Reduce BLOCKS blocks of a row: key of the greatest logit, sum of weights, likelier tokens."""
    entry = tl.program_id(1).to(tl.int64)
    logits_ptr += entry * logits_stride
    own = tl.load(logits_ptr + tl.maximum(tl.load(token_ptr + entry), 0)).to(tl.float32)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    logits = tl.load(logits_ptr + token, mask=token < readable, other=-float("inf")).to(tl.float32)
    if PADDED:
        logits = tl.where(token < vocab, logits, -float("inf"))
    key = tl.max(_search_key(logits, token), 1)
    greatest = tl.maximum(_logit_of(key), -3e38)
    weights = tl.exp2((logits - greatest[:, None]) * LOG2_E)
    place, live = entry * num_blocks + block, block < num_blocks
    tl.store(key_ptr + place, key, mask=live)
    tl.store(sum_ptr + place, tl.sum(weights, 1), mask=live)
    likelier = tl.sum((logits > own).to(tl.int32), 1)
    tl.store(sum_ptr + num_sums + place, likelier.to(tl.float32), mask=live)


@triton.jit(do_not_specialize=["k", "num_sums"], do_not_specialize_on_alignment=["token_ptr"])
def _records_kernel(
    logits_ptr,
    token_ptr,
    key_ptr,
    sum_ptr,
    record_ptr,
    logits_stride,
    vocab,
    k,
    num_blocks,
    num_sums,
    NUM_BLOCKS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write one row's record. Log-probabilities: (logit - greatest) - log(sum of weights)."""
    entry = tl.program_id(0).to(tl.int64)
    logits_ptr += entry * logits_stride
    record_ptr += entry * (3 + 2 * k)
    block = tl.arange(0, NUM_BLOCKS_PAD)
    place, live = entry * num_blocks + block, block < num_blocks
    keys = tl.load(key_ptr + place, mask=live, other=NO_KEY)
    sums = tl.load(sum_ptr + place, mask=live, other=0.0)
    likelier = tl.load(sum_ptr + num_sums + place, mask=live, other=0.0)
    greatest = tl.where(live, tl.maximum(_logit_of(keys), -3e38), -3e38)
    best = tl.max(greatest, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp2((greatest - best) * LOG2_E), 0))

    chosen = tl.maximum(tl.load(token_ptr + entry), 0)
    own = tl.load(logits_ptr + chosen).to(tl.float32)
    value = (_from_key(_to_key(own)) - best) - log_sum
    tl.store(record_ptr, tl.sum(likelier, 0).to(tl.int32) + 1)
    tl.store(record_ptr + 1, chosen)
    tl.store(record_ptr + 2, value.to(tl.int32, bitcast=True))
    for i in range(k):
        top = tl.max(keys, 0)
        token = (top & LAST_TOKEN).to(tl.int32) ^ LAST_TOKEN
        value = (_logit_of(top) - best) - log_sum
        tl.store(record_ptr + 3 + 2 * i, token)
        tl.store(record_ptr + 4 + 2 * i, value.to(tl.int32, bitcast=True))
        others = token // WIDTH * WIDTH + tl.arange(0, WIDTH)
        logits = tl.load(logits_ptr + others, mask=others < vocab, other=-float("inf"))
        rest = _search_key(logits.to(tl.float32), others)
        rest = tl.max(tl.where(rest < top, rest, NO_KEY), 0)
        keys = tl.where(block == token // WIDTH, rest, keys)
