"""Repetition, presence and frequency penalties, by passes over tokens instead of the vocabulary."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import check_shape

HISTORY = 1024  # tokens per program
IN_PROMPT = tl.constexpr(1 << 30)


def penalize(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    floats: Tensor,
    ints: Tensor,
    windows: Tensor,
    token_ids: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Apply penalties in place: repetition over prompt and output, the others over the output.

    logits: fp32 `[n, vocab]`, rows may be strided; rows, lengths: int32 `[n]`, each entry's row of
    the state and number of tokens; floats: fp32 `[num_rows, 6]`, the last three are repetition
    (Keskar et al., 2019), presence and frequency penalty; ints: int64 `[num_rows, 3]`, the last is
    the number of prompt tokens; windows: int32 `[num_rows]`, the number of last tokens that count;
    token_ids: int32 `[num_rows, max_len]`. Rows with neutral penalties or negative lengths, and
    tokens outside the vocabulary are skipped. counts: int32 `[n, vocab]` or larger, contiguous,
    zero before and after.

    Raises ValueError for logits of another type, or with a strided last dimension."""
    n, vocab = check_shape(logits)
    if logits.dtype != torch.float32:
        raise ValueError(f"penalized logits must be fp32, not {logits.dtype}")
    if n == 0:
        return
    if counts is None:
        counts = torch.zeros(n, vocab, dtype=torch.int32, device=logits.device)
    grid = (-(-token_ids.shape[1] // HISTORY), n)
    for kernel in (_count_kernel, _penalize_kernel):
        kernel[grid](
            logits,
            counts,
            rows,
            lengths,
            floats,
            ints,
            windows,
            token_ids,
            logits.stride(0),
            floats.stride(0),
            ints.stride(0),
            token_ids.stride(0),
            vocab,
            HISTORY=HISTORY,
            num_warps=4,
        )


@triton.jit
def _are_neutral(float_ptr):
    """Return whether the penalties of a row change nothing."""
    repetition = tl.load(float_ptr + 3)
    presence = tl.load(float_ptr + 4)
    frequency = tl.load(float_ptr + 5)
    return (repetition == 1) & (presence == 0) & (frequency == 0)


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "length_ptr"])
def _count_kernel(
    logits_ptr,
    count_ptr,
    row_ptr,
    length_ptr,
    float_ptr,
    int_ptr,
    window_ptr,
    token_ptr,
    logits_stride,
    float_stride,
    int_stride,
    token_stride,
    vocab,
    HISTORY: tl.constexpr,
):
    """Count the output tokens among HISTORY tokens of one row, and mark the prompt's."""
    entry = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + entry)
    position = tl.program_id(0) * HISTORY + tl.arange(0, HISTORY)
    if tl.program_id(0) * HISTORY >= length:
        return
    row = tl.load(row_ptr + entry).to(tl.int64)
    if _are_neutral(float_ptr + row * float_stride):
        return
    token = tl.load(token_ptr + row * token_stride + position, mask=position < length, other=-1)
    first = length - tl.load(window_ptr + row)
    known = (token >= 0) & (token < vocab) & (position >= first)
    in_prompt = position < tl.load(int_ptr + row * int_stride + 2)
    place = count_ptr + entry * vocab + token
    tl.atomic_add(place, 1, mask=known & (in_prompt == 0), sem="relaxed")
    tl.atomic_or(place, IN_PROMPT, mask=known & in_prompt, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "length_ptr"])
def _penalize_kernel(
    logits_ptr,
    count_ptr,
    row_ptr,
    length_ptr,
    float_ptr,
    int_ptr,
    window_ptr,
    token_ptr,
    logits_stride,
    float_stride,
    int_stride,
    token_stride,
    vocab,
    HISTORY: tl.constexpr,
):
    """Visit the same tokens. The thread that zeroes a token's count changes its logit, once."""
    entry = tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + entry)
    position = tl.program_id(0) * HISTORY + tl.arange(0, HISTORY)
    if tl.program_id(0) * HISTORY >= length:
        return
    row = tl.load(row_ptr + entry).to(tl.int64)
    float_ptr += row * float_stride
    if _are_neutral(float_ptr):
        return
    repetition = tl.load(float_ptr + 3)
    presence = tl.load(float_ptr + 4)
    frequency = tl.load(float_ptr + 5)
    token = tl.load(token_ptr + row * token_stride + position, mask=position < length, other=-1)
    known = (token >= 0) & (token < vocab)
    count = tl.atomic_xchg(count_ptr + entry * vocab + token, 0, mask=known, sem="relaxed")
    mine = known & (count != 0)
    place = logits_ptr + entry * logits_stride + token
    logits = tl.load(place, mask=mine, other=0.0)
    count &= IN_PROMPT - 1
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits -= frequency * count + tl.where(count > 0, presence, 0.0)
    tl.store(place, logits, mask=mine)
