"""Rules of transcriptions on logits. A program per row reads the row's tokens on the device."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...reference import SpeechRules
from ..pdl import release, supported, wait
from .sampling import check_shape

BLOCK = 4096  # tokens of the vocabulary that are read at once
HISTORY = 64  # tokens of an answer that are searched at once: few phrases are longer


def speech_rules(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    ints: Tensor,
    rules: SpeechRules,
) -> None:
    """Compute `kernels.reference.speech_rules`. logits: fp32, fp16 or bf16.

    Raises ValueError for logits whose last dimension is strided."""
    n, vocab = check_shape(logits)
    if n == 0:
        return
    pdl = supported(logits.device)
    _rules_kernel[(n,)](
        logits,
        rows,
        positions,
        token_ids,
        ints,
        rules.suppressed,
        logits.stride(0),
        token_ids.stride(0),
        ints.stride(0),
        vocab,
        rules.start,
        rules.end,
        rules.no_timestamps,
        rules.first_timestamp,
        rules.last_initial_timestamp,
        BLOCK=BLOCK,
        HISTORY=HISTORY,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "position_ptr"])
def _rules_kernel(
    logits_ptr,
    row_ptr,
    position_ptr,
    token_ptr,
    int_ptr,
    suppressed_ptr,
    logits_stride,
    token_stride,
    int_stride,
    vocab,
    start,
    end,
    no_timestamps,
    first_timestamp,
    last_initial,
    BLOCK: tl.constexpr,
    HISTORY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    entry = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + entry)
    if position < 0:
        return
    row = tl.load(row_ptr + entry).to(tl.int64)
    prompt = tl.load(int_ptr + row * int_stride + 2).to(tl.int32)
    token_ptr += row * token_stride
    prompt_end = tl.load(token_ptr + tl.maximum(prompt - 1, 0))
    if prompt_end == start:
        return
    is_first = position == prompt
    is_timed = prompt_end != no_timestamps

    # Text is allowed from `text` on, timestamps from `least` to `most`.
    text, least, most = _allowed(
        token_ptr, prompt, position, is_timed, vocab, end, first_timestamp, last_initial, HISTORY
    )
    suppressed_ptr += is_first.to(tl.int64) * vocab
    logits_ptr += entry * logits_stride
    never = tl.full([BLOCK], float("-inf"), tl.float32)
    best = never  # of text
    top = never  # of timestamps
    weight = tl.zeros([BLOCK], tl.float32)  # sum of exp(logit - top) of timestamps
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        is_text = token < first_timestamp
        excluded = tl.load(suppressed_ptr + token, mask=inside, other=1) != 0
        excluded = excluded | (is_timed & (token == no_timestamps))
        excluded = excluded | (is_text & (token < text))
        excluded = excluded | ((token >= first_timestamp) & ((token < least) | (token > most)))
        logits = tl.load(logits_ptr + token, mask=inside & ~excluded, other=float("-inf"))
        logits = logits.to(tl.float32)
        tl.store(logits_ptr + token, never, mask=inside & excluded)
        best = tl.maximum(best, tl.where(is_text, logits, float("-inf")))
        logits = tl.where(is_text, float("-inf"), logits)
        higher = tl.maximum(top, logits)
        shift = tl.where(higher > float("-inf"), higher, 0.0)
        weight = weight * tl.exp(top - shift) + tl.exp(logits - shift)
        top = higher
    greatest = tl.max(top, 0)
    shift = tl.where(greatest > float("-inf"), greatest, 0.0)
    total = tl.sum(weight * tl.exp(top - shift), 0)  # at least 1, unless all are excluded
    times = greatest + tl.log(tl.maximum(total, 1.0))
    if is_timed & (times > tl.max(best, 0)):
        for begin in range(0, first_timestamp, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            tl.store(logits_ptr + token, never, mask=token < first_timestamp)


@triton.jit
def _allowed(
    token_ptr,
    prompt,
    position,
    is_timed,
    vocab,
    end,
    first_timestamp,
    last_initial,
    HISTORY: tl.constexpr,
):
    """Return the first text, and the first and last timestamp, that may follow an answer."""
    count = position - prompt
    last = tl.load(token_ptr + position - 1, mask=count >= 1, other=-1)
    before = tl.load(token_ptr + position - 2, mask=count >= 2, other=2147483647)
    after_time = last >= first_timestamp
    ends_pair = after_time & (before >= first_timestamp)
    opens_pair = after_time & (before < first_timestamp)

    latest = tl.full([], -1, tl.int32)
    stop = position
    while is_timed & (stop > prompt) & (latest < 0):
        place = stop - 1 - tl.arange(0, HISTORY)
        token = tl.load(token_ptr + place, mask=place >= prompt, other=-1)
        found = tl.max(tl.where(token >= first_timestamp, place, -1), 0)
        latest = tl.load(token_ptr + tl.maximum(found, 0), mask=found >= 0, other=-1)
        stop -= HISTORY

    text = tl.where(opens_pair, end, 0)
    text = tl.where(count == 0, first_timestamp, text)
    least = tl.where(opens_pair, latest, latest + 1)
    least = tl.where(ends_pair, vocab, least)
    most = tl.where(count == 0, last_initial, vocab)
    return (
        tl.where(is_timed, text, 0),
        tl.where(is_timed, least, 0),
        tl.where(is_timed, most, vocab),
    )
