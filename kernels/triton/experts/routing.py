"""Choice of experts for each token, and blocks of tokens of one expert (`experts`)."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.reference import MIXER_DISTANCE, Routing

from ..counters import counters
from ..pdl import release, supported, wait

MAX_EXPERTS = 512
MAX_CHOSEN = 16
SCORES = ("softmax", "sigmoid", "sparsemixer")
LEAST = tl.constexpr(-1e30)  # rank of an expert whose score is NaN: below all others
MIN_SUM = tl.constexpr(1e-20)  # added to the sum of the chosen scores, so that it can divide
DISTANCE = tl.constexpr(MIXER_DISTANCE)
TAKEN = tl.constexpr(-(2**31))  # key of an expert that is chosen already
FIELDS = tl.constexpr(4)  # of an entry of `Blocks.table`
PAIRS = 1024  # of a program that arranges them


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    slots: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (experts, their weights) of tokens: int32 and fp32, `[num_tokens, num_chosen]`.

    logits: `[num_tokens, num_experts]`, contiguous; bias: `[num_experts]`, added to the scores for
    the choice only; slots: int64 `[num_tokens]`, cache slots: tokens with a negative one are
    padding, with experts -1 and weights 0. Equal scores: the lower index first. The experts of a
    token differ, even if its logits are NaN. factors: fp32 `[num_experts]`, of the weights. See
    `reference.route`.

    Raises ValueError for a routing that is not possible or too large."""
    num_tokens, num_experts = logits.shape
    size = num_experts // routing.num_groups
    _check(logits, routing, bias)
    ids = torch.empty((num_tokens, routing.num_chosen), dtype=torch.int32, device=logits.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    pdl = supported(logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        logits if slots is None else slots,
        factors,
        ids,
        weights,
        float(routing.scale),  # integers would be compiled for their value
        CHOSEN=routing.num_chosen,
        CHOSEN_PAD=triton.next_power_of_2(routing.num_chosen),
        GROUPS=routing.num_groups,
        GROUPS_PAD=triton.next_power_of_2(routing.num_groups),
        CHOSEN_GROUPS=routing.num_chosen_groups,
        SIZE=size,
        SIZE_PAD=triton.next_power_of_2(size),
        SIGMOID=routing.scores == "sigmoid",
        SPARSE=routing.scores == "sparsemixer",
        RENORMALIZE=routing.renormalize,
        BIASED=bias is not None,
        PADDED=slots is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )
    return ids, weights


def _check(logits: Tensor, routing: Routing, bias: Tensor | None) -> None:
    num_experts = logits.shape[1]
    if not logits.is_contiguous():
        raise ValueError("the router's logits must be contiguous")
    if routing.scores not in SCORES:
        raise ValueError(f"scores {routing.scores!r} are not one of {', '.join(SCORES)}")
    if num_experts > MAX_EXPERTS or routing.num_chosen > MAX_CHOSEN:
        raise ValueError(
            f"{routing.num_chosen} of {num_experts} experts are more than {MAX_CHOSEN} "
            f"of {MAX_EXPERTS}"
        )
    groups, chosen = routing.num_groups, routing.num_chosen_groups
    if routing.scores == "sparsemixer" and (groups > 1 or bias is not None):
        raise ValueError("sparsemixer has no groups and no bias")
    if num_experts % groups or chosen > groups:
        raise ValueError(
            f"{num_experts} experts cannot be {groups} groups, {chosen} of them chosen"
        )
    if routing.num_chosen > num_experts // groups * chosen:
        raise ValueError(f"{routing.num_chosen} experts are more than {chosen} groups have")


class Blocks(NamedTuple):
    """Pairs of a token and one of its experts, in blocks of one expert. The device made it.

    Pair `token * num_chosen + choice` is an entry of `ids`."""

    size: int  # most pairs of a block
    pairs: Tensor  # int32 [num_experts, num_tokens], the pairs of each expert, in any order
    table: Tensor
    """int32 [most blocks, FIELDS], by expert: (expert, its first block, its number of blocks, its
    number of pairs). Zeros past the last block."""


def arrange(ids: Tensor, num_experts: int, size: int) -> Blocks:
    """Return the pairs of `ids` in blocks of up to `size`, without those of expert -1.

    ids: int32 `[num_tokens, num_chosen]`, contiguous. The shapes do not depend on the data."""
    num_tokens, device = len(ids), ids.device
    most = (ids.numel() + min(num_experts, ids.numel()) * (size - 1)) // size
    pairs = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=device)
    table = torch.empty((most, FIELDS.value), dtype=torch.int32, device=device)
    pdl = supported(device)
    _arrange_kernel[(-(-ids.numel() // PAIRS),)](
        ids,
        counters(device, num_experts + 1),
        pairs,
        table,
        ids.numel(),
        num_tokens,
        num_experts,
        most,
        size,
        PAIRS=PAIRS,
        EXPERTS=triton.next_power_of_2(num_experts),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )
    return Blocks(size, pairs, table)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    slot_ptr,
    factor_ptr,
    id_ptr,
    weight_ptr,
    scale,
    CHOSEN: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SIGMOID: tl.constexpr,
    SPARSE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of one token. A tile is `[groups, experts of a group]`.

    `factor_ptr` may be None."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)[:, None]
    member = tl.arange(0, SIZE_PAD)[None, :]
    expert = group * SIZE + member
    exists = (group < GROUPS) & (member < SIZE)
    if BIASED:
        bias = tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    logits = tl.load(
        logits_ptr + token * (GROUPS * SIZE) + expert, mask=exists, other=-float("inf")
    )
    logits = logits.to(tl.float32)
    if SPARSE:
        scores = logits
    elif SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits))
        scores /= tl.sum(scores)
    rank = scores
    if BIASED:
        rank += bias
    rank = tl.where(rank > LEAST, rank, LEAST)
    rank = tl.where(exists, rank, -float("inf"))
    if CHOSEN_GROUPS < GROUPS:
        rank = _in_best_groups(rank, group, member, CHOSEN_GROUPS, BIASED)
    key = _ordered(tl.reshape(rank, [GROUPS_PAD * SIZE_PAD]))
    scores = tl.reshape(scores, [GROUPS_PAD * SIZE_PAD])
    bits = scores.to(tl.int32, bitcast=True)
    place = tl.arange(0, GROUPS_PAD * SIZE_PAD)
    lane = tl.arange(0, CHOSEN_PAD)
    ids = tl.full([CHOSEN_PAD], -1, tl.int32)
    chosen = tl.zeros([CHOSEN_PAD], tl.int32)
    for choice in tl.static_range(CHOSEN):
        best = tl.min(tl.where(key == tl.max(key, 0), place, GROUPS_PAD * SIZE_PAD), 0)
        if SPARSE:
            score = _mixed_sparsely(scores, key, place == best).to(tl.int32, bitcast=True)
        else:
            score = tl.max(tl.where(place == best, bits, 0), 0)  # scores are not negative
        key = tl.where(place == best, TAKEN, key)
        ids = tl.where(lane == choice, best // SIZE_PAD * SIZE + best % SIZE_PAD, ids)
        chosen = tl.where(lane == choice, score, chosen)
    weights = chosen.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0) + MIN_SUM
    weights *= scale
    if factor_ptr is not None:
        weights *= tl.load(factor_ptr + ids, mask=lane < CHOSEN, other=0.0)
    if PADDED:
        is_token = tl.load(slot_ptr + token) >= 0
        ids = tl.where(is_token, ids, -1)
        weights = tl.where(is_token, weights, 0.0)
    tl.store(id_ptr + token * CHOSEN + lane, ids, mask=lane < CHOSEN)
    tl.store(weight_ptr + token * CHOSEN + lane, weights, mask=lane < CHOSEN)


@triton.jit
def _mixed_sparsely(logits, key, is_best):
    """Return the weight of the best expert, see `reference`. key: TAKEN of those chosen earlier."""
    best = tl.sum(tl.where(is_best, logits, 0.0), 0)
    is_far = (best - logits) / tl.maximum(tl.abs(logits), best) > DISTANCE
    powers = tl.exp(tl.where(is_far | (key == TAKEN), -float("inf"), logits - best))
    return 1.0 / tl.sum(powers, 0)


@triton.jit
def _ordered(x):
    """Return int32 in the order of fp32 x. GPUs reduce integers of a warp by one instruction."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_best_groups(rank, group, member, CHOSEN_GROUPS: tl.constexpr, BIASED: tl.constexpr):
    """Return the ranks of experts in the best groups, and -inf for the others.

    A group's rank is that of its best expert or, with a bias, the sum of its two best."""
    best = tl.max(rank, 1, keep_dims=True)
    if BIASED:
        first = tl.min(tl.where(rank == best, member, rank.shape[1]), 1, keep_dims=True)
        best += tl.max(tl.where(member == first, -float("inf"), rank), 1, keep_dims=True)
    is_chosen = group < 0
    for _ in tl.static_range(CHOSEN_GROUPS):
        first = tl.min(tl.where(best == tl.max(best), group, rank.shape[0]))
        is_chosen |= group == first
        best = tl.where(group == first, -float("inf"), best)
    return tl.where(is_chosen, rank, -float("inf"))


@triton.jit(do_not_specialize=["num_pairs", "num_tokens", "num_experts", "most", "size"])
def _arrange_kernel(
    id_ptr,
    count_ptr,
    pair_ptr,
    table_ptr,
    num_pairs,
    num_tokens,
    num_experts,
    most,
    size,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the pairs of each expert. The last program to finish lists the blocks.

    A pair's place in its list depends on the order of programs, but no result does."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    wait(PDL)
    release(PDL)
    expert = tl.load(id_ptr + pair, mask=pair < num_pairs, other=-1)
    place = tl.atomic_add(count_ptr + expert, 1, mask=expert >= 0, sem="relaxed")
    at = expert.to(tl.int64) * num_tokens + place
    tl.store(pair_ptr + at, pair, mask=(expert >= 0) & (place < num_tokens))
    tl.debug_barrier()  # all threads have counted before the number of programs rises
    finished = tl.atomic_add(count_ptr + num_experts, 1, sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        one = tl.arange(0, EXPERTS)
        exists = one < num_experts
        count = tl.load(count_ptr + one, mask=exists, other=0, cache_modifier=".cg")
        tl.debug_barrier()  # several threads have read a count before one of them zeroes it
        tl.store(count_ptr + one, 0, mask=one <= num_experts)
        tl.store(count_ptr + num_experts, 0)
        blocks = tl.cdiv(count, size)
        first = tl.cumsum(blocks, 0) - blocks
        for block in range(tl.max(blocks, 0)):
            entry = table_ptr + (first + block) * FIELDS
            within = block < blocks
            tl.store(entry, one, mask=within)
            tl.store(entry + 1, first, mask=within)
            tl.store(entry + 2, blocks, mask=within)
            tl.store(entry + 3, count, mask=within)
        for start in range(tl.sum(blocks, 0) * FIELDS, most * FIELDS, PAIRS):
            field = start + tl.arange(0, PAIRS)
            tl.store(table_ptr + field, 0, mask=field < most * FIELDS)
