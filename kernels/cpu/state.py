"""Inputs, drafts and samples of a step on a CPU: NumPy over tensors of the state.

`kernels.reference` and `kernels.drafts` define these functions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit.kernels import cpu, plain
from toolkit.kernels.cpu.sampling import sample as choose
from toolkit.kernels.drafts import DraftInputs, Points, look_up


def copy_runs(target: Tensor, runs: Tensor, values: Tensor, longest: int) -> None:
    table, source = target.numpy(), values.numpy()
    if longest == 1:
        rows, columns, begins, _ = runs.numpy().T
        table[rows, columns] = source[begins]
        return
    for row, column, begin, length in runs.tolist():
        table[row, column : column + length] = source[begin : begin + length]


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
    starts, lens = query_start_loc.numpy(), seq_lens.numpy()
    total, num_tokens = int(starts[-1]), len(out[0])
    request = np.repeat(np.arange(len(lens)), np.diff(starts))
    position = np.arange(total) - (starts[1:] - lens)[request]
    own = rows.numpy()[request]
    block = block_table.numpy()[own, position // block_size].astype(np.int64)
    found = (
        token_ids.numpy()[own, position + ahead],
        position,
        block * block_size + position % block_size,
    )
    for target, values, padding in zip(out, found, (0, 0, -1), strict=True):
        array = target.numpy()
        array[:total] = values
        array[total:num_tokens] = padding
    if adapters is not None:
        of_tokens = adapters[1].numpy()
        of_tokens[:total] = adapters[0].numpy()[request]
        of_tokens[total:] = -1
    if shifts is not None:
        shifted = shifts[1].numpy()
        shifted[:total] = position + shifts[0].numpy()[own]
        shifted[total:] = 0


def locate_points(
    points: Points,
    rows: Tensor,
    query_start_loc: Tensor,
    lengths: Tensor,
    adapters: tuple[Tensor, Tensor] | None = None,
) -> None:
    starts, ends, own = points.starts.numpy(), points.ends.numpy(), rows.numpy()
    counts = np.diff(starts)
    samples = ends < 0
    seq_lens = np.where(samples, lengths.numpy()[own] + counts - 1, ends)
    points.seq_lens.numpy()[:] = seq_lens
    total = int(starts[-1])
    request = np.repeat(np.arange(len(ends)), counts)
    back = starts[1:][request] - np.arange(total)  # 1 for a request's last point
    for target, values, padding in (
        (points.tokens, query_start_loc.numpy()[1:][request] - back, 0),
        (points.rows, own[request], own[-1]),
        (points.positions, np.where(samples[request], seq_lens[request] - back + 1, -1), -1),
    ):
        array = target.numpy()
        array[:total] = values
        array[total:] = padding
    if adapters is not None:
        of_points = adapters[1].numpy()
        of_points[:total] = adapters[0].numpy()[request]
        of_points[total:] = -1


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
    starts, ends = points.starts.numpy(), points.ends.numpy()
    kept_of_all = counts.numpy()
    kept_of_all[: len(ends)][ends >= 0] = 0
    (which,) = np.nonzero(ends == when)
    if not len(which):
        return
    own, firsts = rows.numpy()[which], starts[which]
    numbers = starts[which + 1] - firsts
    request = np.repeat(np.arange(len(which)), numbers)
    begins = numbers.cumsum() - numbers
    nth = np.arange(len(request)) - begins[request]
    point = firsts[request] + nth
    place, tokens = points.positions.numpy()[point], sampled.numpy()[point]
    table = token_ids.numpy()
    is_last = (table[own[request], place] != tokens) | (nth == numbers[request] - 1)
    kept = np.minimum.reduceat(np.where(is_last, nth, numbers[request]), begins) + 1
    keeps = nth < kept[request]
    table[own[request[keeps]], place[keeps]] = np.maximum(tokens[keeps], 0)
    kept_of_all[which] = kept
    lengths.numpy()[own] += kept.astype(np.int32)


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
    own, table = rows.numpy(), token_ids.numpy()
    place = lengths.numpy()[own] + nth
    samples = ends.numpy() < 0
    (late,) = np.nonzero(samples & (place >= limit) & (place < table.shape[1]))
    table[own[late], place[late]] = 0
    for column, nothing in zip(out, (0, 0, -1, 1, -1), strict=True):
        column.numpy()[:] = nothing
    (which,) = np.nonzero(samples & (place < limit))
    own, place = own[which], place[which]
    position = place - 1 - ahead
    block = block_table.numpy()[own, position // block_size].astype(np.int64)
    slots = block * block_size + position % block_size
    found = table[own, place - 1], position, slots, position + 1, place
    for column, values in zip(out, found, strict=True):
        column.numpy()[which] = values


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
    (which,) = np.nonzero(points.ends.numpy() == when)
    if not len(which):
        return
    table, predicted = token_ids.numpy(), predictions.numpy()
    own, found = rows.numpy()[which], drafts.numpy()
    ends, numbers = lengths.numpy()[own], prediction_lengths.numpy()[own]
    prompts, width = num_prompt_tokens.numpy()[own], found.shape[1]
    step = zip(which, own, ends, numbers, prompts, strict=True)
    for request, row, end, number, prompt in step:
        tokens = look_up(
            table[row, :end], predicted[row, :number], int(prompt), width, (least, most)
        )
        found[request] = -1
        found[request, : len(tokens)] = tokens
        room = table[row, end : end + width]
        room[:] = np.maximum(found[request, : len(room)], 0)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    token_ids: Tensor | None,
    out: Tensor,
) -> None:
    if not cpu.available():
        plain.sample(logits, rows, positions, floats, ints, token_ids, out)
        return
    place, found = positions.numpy(), out.numpy()
    (which,) = np.nonzero(place >= 0)
    if len(which) < len(place):
        found[:] = plain.NOT_SAMPLED
        index = torch.from_numpy(which)
        logits, rows, positions = logits[index], rows[index], positions[index]
    found[which] = choose(logits.float(), rows, positions, floats, ints).numpy()
    if token_ids is not None:
        token_ids.numpy()[rows.numpy(), positions.numpy()] = np.maximum(found[which], 0)
