"""Log-probabilities of chosen and likeliest tokens, without an fp32 array of all of them."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import LOG2_E, check_shape, power_of_two

CHUNK = 4096  # tokens per program of the pass over the vocabulary


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens int32 `[n, 1 + k]`, log-probabilities fp32 `[n, 1 + k]`, ranks int32 `[n]`).

    logits: `[n, vocab]`, fp32, fp16 or bf16, rows may be strided; token_ids: `[n]`, the first
    tokens (0 if negative). The k likeliest follow. All values come from one formula in one kernel,
    so a token's value is bitwise the same in both places. A rank is one more than the number of
    likelier tokens.

    Raises ValueError for logits whose last dimension is strided."""
    n, vocab = check_shape(logits)
    k = min(k, vocab)
    tokens = torch.empty(n, 1 + k, dtype=torch.int32, device=logits.device)
    values = torch.empty(n, 1 + k, dtype=torch.float32, device=logits.device)
    rank = torch.empty(n, dtype=torch.int32, device=logits.device)
    if n == 0:
        return tokens, values, rank
    tokens[:, 0] = token_ids.clamp(min=0)
    if k:
        tokens[:, 1:] = logits.topk(k, dim=-1).indices
    num_chunks = -(-vocab // (CHUNK))
    sums = torch.empty(2, n, num_chunks, dtype=torch.float32, device=logits.device)
    likelier = torch.empty(n, num_chunks, dtype=torch.int32, device=logits.device)
    _log_sums_kernel[(num_chunks, n)](
        logits,
        tokens,
        sums,
        likelier,
        logits.stride(0),
        tokens.stride(0),
        vocab,
        n * num_chunks,
        CHUNK=CHUNK,
        num_warps=4,
    )
    _logprobs_kernel[(n,)](
        logits,
        tokens,
        sums,
        likelier,
        values,
        rank,
        logits.stride(0),
        1 + k,
        num_chunks,
        n * num_chunks,
        WANTED_PAD=power_of_two(1 + k),
        NUM_CHUNKS_PAD=power_of_two(num_chunks),
        num_warps=1,
    )
    return tokens, values, rank


@triton.jit(do_not_specialize=["token_stride", "num_sums"])
def _log_sums_kernel(
    logits_ptr,
    token_ptr,
    sum_ptr,
    likelier_ptr,
    logits_stride,
    token_stride,
    vocab,
    num_sums,
    CHUNK: tl.constexpr,
):
    """Reduce one chunk of a row: greatest logit, sum of weights, number of likelier tokens."""
    chunk = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits_ptr += entry * logits_stride
    logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    own = tl.load(logits_ptr + tl.load(token_ptr + entry * token_stride)).to(tl.float32)
    greatest = tl.maximum(tl.max(logits, 0), -3e38)
    total = tl.sum(tl.exp2((logits - greatest) * LOG2_E), 0)
    place = entry * tl.num_programs(0) + chunk
    tl.store(sum_ptr + place, greatest)
    tl.store(sum_ptr + num_sums + place, total)
    tl.store(likelier_ptr + place, tl.sum((logits > own).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_wanted", "num_sums"])
def _logprobs_kernel(
    logits_ptr,
    token_ptr,
    sum_ptr,
    likelier_ptr,
    value_ptr,
    rank_ptr,
    logits_stride,
    num_wanted,
    num_chunks,
    num_sums,
    WANTED_PAD: tl.constexpr,
    NUM_CHUNKS_PAD: tl.constexpr,
):
    """Compute one row's log-probabilities: (logit - greatest) - log(sum of weights)."""
    entry = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, NUM_CHUNKS_PAD)
    place = entry * num_chunks + chunk
    live = chunk < num_chunks
    greatest = tl.load(sum_ptr + place, mask=live, other=-float("inf"))
    sums = tl.load(sum_ptr + num_sums + place, mask=live, other=0.0)
    likelier = tl.load(likelier_ptr + place, mask=live, other=0)
    best = tl.max(greatest, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp2((greatest - best) * LOG2_E), 0))
    index = tl.arange(0, WANTED_PAD)
    wanted = index < num_wanted
    token = tl.load(token_ptr + entry * num_wanted + index, mask=wanted, other=0)
    logits = tl.load(logits_ptr + entry * logits_stride + token, mask=wanted, other=0.0).to(
        tl.float32
    )
    tl.store(value_ptr + entry * num_wanted + index, (logits - best) - log_sum, mask=wanted)
    tl.store(rank_ptr + entry, tl.sum(likelier, 0) + 1)
