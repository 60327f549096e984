"""Kernels of steps that verify drafts: where a step samples, which drafts are right, new drafts.

The host schedules a step before it knows how many drafts of the last one were right. So the numbers
of tokens are on the device, and these kernels work from them.

Nothing here waits for the GPU, and grids depend on host integers only, so a call can be captured in
a CUDA graph and replayed with other requests."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...drafts import DraftInputs, Points
from ..sizes import power_of_two

POINTS = 64  # points per program
REQUESTS = 128
CHUNK = 2048  # tokens that are compared at once


def locate_points(
    points: Points,
    rows: Tensor,
    query_start_loc: Tensor,
    lengths: Tensor,
    adapters: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute `kernels.drafts.locate_points`."""
    num_reqs, num_points = rows.shape[0], points.rows.shape[0]
    _locate_kernel[(-(-max(num_reqs, num_points) // POINTS),)](
        *points,
        rows,
        query_start_loc,
        lengths,
        *(adapters or (rows, rows)),
        num_reqs,
        num_points,
        ADAPTED=adapters is not None,
        POINTS=POINTS,
        REQUESTS=REQUESTS,
        num_warps=4,
    )


def accept_drafts(
    points: Points,
    when: int,
    rows: Tensor,
    sampled: Tensor,
    token_ids: Tensor,
    lengths: Tensor,
    counts: Tensor,
    most: int,
) -> None:
    """Compute `kernels.drafts.accept_drafts`. `most`: points of a request."""
    _accept_kernel[(rows.shape[0],)](
        points.starts,
        points.ends,
        points.positions,
        rows,
        sampled,
        token_ids,
        lengths,
        counts,
        when,
        token_ids.stride(0),
        POINTS=power_of_two(most),
        num_warps=1,
    )


def draft_inputs(
    ends: Tensor,
    rows: Tensor,
    lengths: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_size: int,
    nth: int,
    ahead: int,
    limit: int,
    out: DraftInputs,
) -> None:
    """Compute `kernels.drafts.draft_inputs`."""
    num_reqs = rows.shape[0]
    _draft_inputs_kernel[(-(-num_reqs // REQUESTS),)](
        ends,
        rows,
        lengths,
        token_ids,
        block_table,
        *out,
        num_reqs,
        nth,
        limit,
        token_ids.shape[1],
        token_ids.stride(0),
        block_table.stride(0),
        AHEAD=ahead,
        BLOCK_SIZE=block_size,
        REQUESTS=REQUESTS,
        num_warps=4,
    )


def look_up_drafts(
    points: Points,
    when: int,
    rows: Tensor,
    token_ids: Tensor,
    lengths: Tensor,
    num_prompt_tokens: Tensor,
    predictions: Tensor,
    prediction_lengths: Tensor,
    drafts: Tensor,
    least: int,
    most: int,
) -> None:
    """Compute `kernels.drafts.look_up_drafts`."""
    num_reqs, num_drafts = drafts.shape
    _look_up_kernel[(num_reqs,)](
        points.ends,
        rows,
        token_ids,
        lengths,
        num_prompt_tokens,
        predictions,
        prediction_lengths,
        drafts,
        when,
        token_ids.shape[1],
        token_ids.stride(0),
        predictions.stride(0),
        num_prompt_tokens.stride(0),
        LEAST=least,
        MOST=most,
        DRAFTS=num_drafts,
        DRAFTS_PAD=power_of_two(num_drafts),
        CHUNK=CHUNK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_points"])
def _locate_kernel(
    start_ptr,
    end_ptr,
    seq_len_ptr,
    point_token_ptr,
    point_row_ptr,
    position_ptr,
    row_ptr,
    query_start_ptr,
    length_ptr,
    adapter_ptr,
    point_adapter_ptr,
    num_reqs,
    num_points,
    ADAPTED: tl.constexpr,
    POINTS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Locate POINTS points. A point's request is the number of requests ended before it."""
    index = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    seq_len = _length_of(index, start_ptr, end_ptr, row_ptr, length_ptr, num_reqs)
    tl.store(seq_len_ptr + index, seq_len, mask=index < num_reqs)

    request = tl.zeros([POINTS], tl.int32)
    for base in range(0, num_reqs, REQUESTS):
        other = base + tl.arange(0, REQUESTS)
        end = tl.load(start_ptr + other + 1, mask=other < num_reqs, other=2147483647)
        request += tl.sum((end[None, :] <= index[:, None]).to(tl.int32), 1)
    live = request < num_reqs
    back = tl.load(start_ptr + request + 1, mask=live, other=0) - index
    token = tl.load(query_start_ptr + request + 1, mask=live, other=0) - back
    seq_len = _length_of(request, start_ptr, end_ptr, row_ptr, length_ptr, num_reqs)
    samples = live & (tl.load(end_ptr + request, mask=live, other=0) < 0)
    stored = index < num_points
    tl.store(point_token_ptr + index, tl.where(live, token, 0).to(tl.int64), mask=stored)
    row = tl.load(row_ptr + tl.minimum(request, num_reqs - 1))
    tl.store(point_row_ptr + index, row, mask=stored)
    tl.store(position_ptr + index, tl.where(samples, seq_len - back + 1, -1), mask=stored)
    if ADAPTED:
        adapter = tl.load(adapter_ptr + request, mask=live, other=-1)
        tl.store(point_adapter_ptr + index, adapter, mask=stored)


@triton.jit
def _length_of(request, start_ptr, end_ptr, row_ptr, length_ptr, num_reqs):
    """Return the requests' numbers of tokens with this step's; 0 past the last request."""
    live = request < num_reqs
    end = tl.load(end_ptr + request, mask=live, other=0)
    samples = live & (end < 0)
    row = tl.load(row_ptr + request, mask=live, other=0)
    more = tl.load(start_ptr + request + 1, mask=live, other=0) - 1
    more -= tl.load(start_ptr + request, mask=live, other=0)
    return tl.where(samples, tl.load(length_ptr + row, mask=samples, other=0) + more, end)


@triton.jit(do_not_specialize=["when"])
def _accept_kernel(
    start_ptr,
    end_ptr,
    position_ptr,
    row_ptr,
    sampled_ptr,
    token_ptr,
    length_ptr,
    count_ptr,
    when,
    token_stride,
    POINTS: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(end_ptr + request)
    if end >= 0:
        tl.store(count_ptr + request, 0)
    if end == when:
        row = tl.load(row_ptr + request).to(tl.int64)
        start = tl.load(start_ptr + request)
        number = tl.load(start_ptr + request + 1) - start
        nth = tl.arange(0, POINTS)
        live = nth < number
        sampled = tl.load(sampled_ptr + start + nth, mask=live, other=-1)
        position = tl.load(position_ptr + start) + nth
        place = token_ptr + row * token_stride + position
        is_draft = nth < number - 1
        draft = tl.load(place, mask=is_draft, other=-1)
        is_right = is_draft & (draft == sampled)
        count = tl.min(tl.where(is_right, POINTS, nth), 0) + 1
        # Right drafts are written already, and the last token replaces a wrong one.
        tl.store(place, tl.maximum(sampled, 0), mask=nth == count - 1)
        tl.store(length_ptr + row, tl.load(position_ptr + start) + count)
        tl.store(count_ptr + request, count)


@triton.jit(do_not_specialize=["num_reqs", "nth", "limit", "width"])
def _draft_inputs_kernel(
    end_ptr,
    row_ptr,
    length_ptr,
    token_ptr,
    table_ptr,
    out_token_ptr,
    out_position_ptr,
    out_slot_ptr,
    out_seq_len_ptr,
    out_sample_ptr,
    num_reqs,
    nth,
    limit,
    width,
    token_stride,
    table_stride,
    AHEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    stored = request < num_reqs
    row = tl.load(row_ptr + request, mask=stored, other=0).to(tl.int64)
    samples = stored & (tl.load(end_ptr + request, mask=stored, other=0) < 0)
    place = tl.load(length_ptr + row, mask=samples, other=0) + nth
    live = samples & (place < limit)
    position = tl.where(live, place - 1 - AHEAD, 0)
    token_ptr += row * token_stride + place
    token = tl.load(token_ptr - 1, mask=live, other=0)
    tl.store(token_ptr, 0, mask=samples & (place >= limit) & (place < width))
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(out_token_ptr + request, token, mask=stored)
    tl.store(out_position_ptr + request, position, mask=stored)
    tl.store(out_slot_ptr + request, slot, mask=stored)
    tl.store(out_seq_len_ptr + request, position + 1, mask=stored)
    tl.store(out_sample_ptr + request, tl.where(live, place, -1), mask=stored)


@triton.jit(do_not_specialize=["when", "width"])
def _look_up_kernel(
    end_ptr,
    row_ptr,
    token_ptr,
    length_ptr,
    prompt_ptr,
    prediction_ptr,
    prediction_length_ptr,
    draft_ptr,
    when,
    width,
    token_stride,
    prediction_stride,
    prompt_stride,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0)
    if tl.load(end_ptr + request) == when:
        row = tl.load(row_ptr + request).to(tl.int64)
        token_ptr += row * token_stride
        prediction_ptr += row * prediction_stride
        length = tl.load(length_ptr + row)
        predicted = tl.load(prediction_length_ptr + row)
        begin = tl.full([], -1, tl.int32)  # of the drafts in the prediction
        if predicted > 0:
            prompt = tl.load(prompt_ptr + row * prompt_stride).to(tl.int32)
            output = length - prompt
            if _is_prefix(token_ptr + prompt, prediction_ptr, output, predicted, CHUNK):
                begin = output
            else:
                end = _match(prediction_ptr, predicted, token_ptr, length, LEAST, MOST, CHUNK)
                if (end >= 0) & (end < predicted):
                    begin = end
        nth = tl.arange(0, DRAFTS_PAD)
        found = nth < DRAFTS
        if begin >= 0:
            found = found & (begin + nth < predicted)
            draft = tl.load(prediction_ptr + begin + nth, mask=found, other=-1)
        else:
            end = _match(token_ptr, length - 1, token_ptr, length, LEAST, MOST, CHUNK)
            found = found & (end >= 0)
            # A repetition goes on past the end: a draft is the token one period earlier.
            period = tl.maximum(length - end, 1)
            draft = tl.load(token_ptr + end + nth % period, mask=found, other=-1)
        tl.store(draft_ptr + request * DRAFTS + nth, draft, mask=nth < DRAFTS)
        place = token_ptr + length + nth
        tl.store(place, tl.maximum(draft, 0), mask=(nth < DRAFTS) & (length + nth < width))


@triton.jit
def _is_prefix(token_ptr, text_ptr, length, most, CHUNK: tl.constexpr):
    """Return whether the text of `most` tokens begins with these tokens."""
    wrong = tl.zeros([CHUNK], tl.int32)
    for base in range(0, tl.minimum(length, most), CHUNK):
        index = base + tl.arange(0, CHUNK)
        live = index < tl.minimum(length, most)
        token = tl.load(token_ptr + index, mask=live, other=0)
        wrong += (token != tl.load(text_ptr + index, mask=live, other=0)).to(tl.int32)
    return (length <= most) & (tl.sum(wrong, 0) == 0)


@triton.jit
def _match(
    text_ptr,
    size,
    token_ptr,
    length,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the end of the latest of the longest matches of the last tokens in a text, or -1."""
    best = tl.zeros([CHUNK], tl.int64)
    for base in range(0, size, CHUNK):
        end = base + tl.arange(0, CHUNK) + 1
        run = end <= size
        matched = tl.zeros([CHUNK], tl.int32)
        for nth in tl.static_range(MOST):
            last = tl.load(token_ptr + length - 1 - nth, mask=nth < length, other=-1)
            token = tl.load(text_ptr + end - 1 - nth, mask=run & (nth < end), other=-2)
            run = run & (token == last)
            matched += run.to(tl.int32)
        key = (matched.to(tl.int64) << 32) + end
        best = tl.maximum(best, tl.where(matched >= LEAST, key, 0))
    top = tl.max(best, 0)
    return tl.where(top > 0, (top & 0xFFFFFFFF).to(tl.int32), -1)
