"""Definition of the kernels of steps that verify drafts (`triton.drafts`), in plain PyTorch.

The host schedules a step before it knows how many drafts of the last one were right. So the numbers
of tokens are on the device, and these functions work from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.int32]

SAMPLES, LATER = -1, -2
"""Ends of requests that sample: with the step, and after it, from other logits."""


class Points(NamedTuple):
    """Points of a step: the tokens after which it samples. A request's points are its last tokens.

    A point is the newest token of a request, or one of its drafts."""

    starts: Tensor  # int32 `[num_reqs + 1]`: first point of each request
    ends: Tensor
    """int32 `[num_reqs]`: `SAMPLES` or `LATER`. A request that does not sample: its number of
    tokens with this step's."""
    seq_lens: Tensor
    """int32 `[num_reqs]`: numbers of tokens with this step's. One that samples has those of its row
    and its drafts."""
    tokens: Tensor  # int64 `[num_points]`: index of the token in the step; 0 past the last point
    rows: Tensor  # int32 `[num_points]`
    positions: Tensor  # int32 `[num_points]`: of the token to sample; -1: none


class DraftInputs(NamedTuple):
    """Inputs of a drafter that computes a position of each request. All are `[num_reqs]`.

    A request that gets no draft has token 0 at position 0, and nothing is cached for it."""

    token_ids: Tensor  # int32
    positions: Tensor  # int32
    slots: Tensor  # int64, -1: none
    seq_lens: Tensor  # int32, with the position
    sample_positions: Tensor  # int32, of the draft; -1: none


def locate_points(
    points: Points,
    rows: Tensor,
    query_start_loc: Tensor,
    lengths: Tensor,
    adapters: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill all of `points` but starts and ends.

    rows: `[num_reqs]`, query_start_loc: `[num_reqs + 1]`, first token of each request; lengths:
    `[num_rows]`, tokens of each row. adapters: `[num_reqs]`, copied to their points `[num_points]`;
    -1 past the last."""
    starts, ends = points.starts.tolist(), points.ends.tolist()
    points.tokens.fill_(0)
    points.rows.fill_(int(rows[-1]))
    points.positions.fill_(-1)
    if adapters is not None:
        adapters[1].fill_(-1)
    for request, (row, end) in enumerate(zip(rows.tolist(), ends, strict=True)):
        begin, stop = starts[request], starts[request + 1]
        number = stop - begin
        length = int(lengths[row]) + number - 1 if end < 0 else end
        points.seq_lens[request] = length
        last = int(query_start_loc[request + 1])
        points.tokens[begin:stop] = torch.arange(last - number, last)
        points.rows[begin:stop] = row
        if end < 0:
            points.positions[begin:stop] = torch.arange(length - number, length) + 1
        if adapters is not None:
            adapters[1][begin:stop] = adapters[0][request]


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
    """Keep the tokens that follow right drafts, for requests whose end is `when`.

    sampled: `[num_points]`; token_ids: `[num_rows, max_len]`, with the drafts after a row's tokens;
    lengths: `[num_rows]`; both change. counts: `[num_reqs]`, how many tokens are kept; 0 for those
    that do not sample. most: points of a request. -1 in `sampled` is kept as token 0, and is a
    request's last."""
    starts, ends = points.starts.tolist(), points.ends.tolist()
    for request, (row, end) in enumerate(zip(rows.tolist(), ends, strict=True)):
        if end >= 0:
            counts[request] = 0
        if end != when:
            continue
        count = 0
        for point in range(starts[request], starts[request + 1]):
            place, token = int(points.positions[point]), int(sampled[point])
            is_right = int(token_ids[row, place]) == token
            token_ids[row, place] = max(token, 0)
            count += 1
            if not is_right:
                break
        counts[request] = count
        lengths[row] += count


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
    """Fill `out` for draft `nth`, from 0 on, of the requests that sample. A missing one is token 0.

    ends, rows: `[num_reqs]`, see `Points`; lengths: `[num_rows]`, with the sampled tokens;
    token_ids: `[num_rows, max_len]`, with the drafts so far after them; block_table: `[num_rows,
    max_blocks]`. The position is that before the draft, less `ahead`: of its token come the keys,
    of the token `ahead` later the id. limit: number of positions; drafts end there."""
    for request, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
        place = int(lengths[row]) + nth
        if end < 0 and limit <= place < token_ids.shape[1]:
            token_ids[row, place] = 0
        if end >= 0 or place >= limit:
            for column, nothing in zip(out, (0, 0, -1, 1, -1), strict=True):
                column[request] = nothing
            continue
        position = place - 1 - ahead
        out.token_ids[request] = token_ids[row, place - 1]
        out.positions[request] = position
        block = int(block_table[row, position // block_size])
        out.slots[request] = block * block_size + position % block_size
        out.seq_lens[request] = position + 1
        out.sample_positions[request] = place


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
    """Write drafts after the tokens of requests whose end is `when`, by prompt lookup.

    num_prompt_tokens: `[num_rows]`, may be strided; predictions: int32 `[num_rows, width]` and
    prediction_lengths: int32 `[num_rows]`, texts to look at before a row's own tokens; drafts:
    `[num_reqs, num_drafts]`, the same drafts, -1 where there is none, which is token 0 in
    `token_ids`. least, most: tokens of a match. `look_up` defines which drafts."""
    for request, (row, end) in enumerate(zip(rows.tolist(), points.ends.tolist(), strict=True)):
        if end != when:
            continue
        length = int(lengths[row])
        prediction = predictions[row, : int(prediction_lengths[row])].cpu().numpy()
        found = look_up(
            token_ids[row, :length].cpu().numpy(),
            prediction,
            int(num_prompt_tokens[row]),
            drafts.shape[1],
            (least, most),
        )
        drafts[request] = -1
        drafts[request, : len(found)] = torch.from_numpy(found.copy())
        end = min(length + drafts.shape[1], token_ids.shape[1])
        token_ids[row, length:end] = drafts[request, : end - length].clamp(min=0)


def look_up(
    tokens: Tokens, prediction: Tokens, num_prompt_tokens: int, number: int, sizes: tuple[int, int]
) -> Tokens:
    """Return up to `number` drafts that follow the tokens. `prediction` may be empty.

    sizes: least and most tokens of a match. An output that begins the prediction continues so."""
    if len(prediction):
        output = tokens[num_prompt_tokens:]
        if np.array_equal(prediction[: len(output)], output):
            return prediction[len(output) : len(output) + number]
        end = match(prediction, tokens, *sizes)
        if 0 <= end < len(prediction):
            return prediction[end : end + number]
    end = match(tokens[:-1], tokens, *sizes)
    if end < 0:
        return tokens[:0]
    # A repetition goes on past the end of the tokens: draft j is the token one period earlier.
    return np.resize(tokens[end:], number)


def match(text: Tokens, tokens: Tokens, least: int, most: int) -> int:
    """Return the end of the latest of the longest matches of the end of `tokens` in `text`.

    A match has `least` to `most` tokens. -1: there is none."""
    if not len(tokens):
        return -1
    ends, found, length = np.flatnonzero(text == tokens[-1]) + 1, -1, 1
    while len(ends):
        if length >= least:
            found = int(ends[-1])
        length += 1
        if length > min(most, len(tokens)):
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == tokens[-length]]
    return found
