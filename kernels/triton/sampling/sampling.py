"""Sampling on NVIDIA GPUs: one pass over the logits, then one small program per row.

A random choice is an exponential race, also called the Gumbel-max trick: a token's time is an
exponential number, keyed by seed, position and token (`kernels.reference.exponentials`), divided by
its weight exp((logit - greatest) / temperature). The first token wins. A row of logits is cut into
blocks of WIDTH tokens. The pass computes the greatest logit of each block, its winner, and the
winner's time with weights relative to the block's greatest logit. Without filters, the first of
these winners is the choice.

Filters (top-k, top-p, min-p) need no sort. The k-th greatest of the blocks' maxima bounds the k-th
greatest logit from below, and only the about k blocks that reach it are read. Top-p is tested after
the choice: a token is kept if the likelier ones weigh less than top-p, else these race again, with
the same numbers. The result is the winner among the kept tokens: whatever is rejected is not kept,
and neither is anything less likely. A race among some tokens keeps the winners of blocks that are
among them, and repeats only blocks whose winner is not and was earlier than all of these.

A choice depends bitwise on the logits, parameters, seed and position of its own row alone: no sum
is taken in an order that depends on the batch.

Nothing here waits for the GPU, and grids depend on host integers only, so a call can be captured in
a CUDA graph and replayed with other rows. Other numbers of rows need no compilation."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..pdl import release, supported, wait
from ..sizes import power_of_two

WIDTH = 256  # tokens of a block
BLOCKS = 16  # blocks per program of a pass over the vocabulary
ALIGNED = 16  # divisor of a row's start and end for the widest loads
TRAILING_ZEROS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits that are 0 in numbers of a type when they are widened to fp32."""
NOT_SAMPLED = tl.constexpr(-2)
NOT_FINITE = tl.constexpr(-1)
LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    token_ids: Tensor | None,
    out: Tensor,
) -> None:
    """Choose a token from each row of logits, and write it into `out` and into the state.

    logits: `[n, vocab]`, fp32, fp16 or bf16, rows may be strided; rows, positions: int32 `[n]`,
    each entry's row of the state and the position of its token. Entries at negative positions are
    skipped and have -2 in `out`. floats: fp32 `[num_rows, 6]`, the first three are temperature,
    top-p and min-p; ints: int64 `[num_rows, 3]`, the first two are top-k and seed; token_ids: int32
    `[num_rows, max_len]` or None, receives the token at `[row, position]`; out: int32 `[n]`.

    Temperature 0 chooses the greatest logit, the first of equals. Top-k is off at 0, and keeps ties
    at the k-th place. Top-p applies to the tokens that pass top-k and min-p. If a logit is NaN or
    +inf, or all are -inf, `out` is -1 and token 0 is stored.

    A vocabulary that is not divisible by ALIGNED is read faster from rows that are padded so.

    Raises ValueError for logits whose last dimension is strided."""
    n, vocab = check_shape(logits)
    if n == 0:
        return
    num_blocks = -(-vocab // WIDTH)
    readable = _readable(logits)
    blocks, warps = BLOCKS, 4
    if readable % ALIGNED:  # loads are narrow, and a row of a tile is spread over fewer warps
        blocks, warps = BLOCKS // 2, 2
    statistics = torch.empty(3, n, num_blocks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(2, n, num_blocks, dtype=torch.int32, device=logits.device)
    pdl = supported(logits.device)
    _statistics_kernel[(-(-num_blocks // blocks), n)](
        logits,
        rows,
        positions,
        floats,
        ints,
        statistics,
        indices,
        logits.stride(0),
        floats.stride(0),
        ints.stride(0),
        vocab,
        readable,
        num_blocks,
        n * num_blocks,
        PADDED=readable != vocab,
        BLOCKS=blocks,
        WIDTH=WIDTH,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=warps,
    )
    _choose_kernel[(n,)](
        logits,
        rows,
        positions,
        floats,
        ints,
        token_ids,
        out,
        statistics,
        indices,
        logits.stride(0),
        floats.stride(0),
        ints.stride(0),
        0 if token_ids is None else token_ids.stride(0),
        vocab,
        readable,
        num_blocks,
        n * num_blocks,
        PADDED=readable != vocab,
        TRAILING_ZEROS=TRAILING_ZEROS[logits.dtype],
        NUM_BLOCKS_PAD=power_of_two(num_blocks),
        BLOCKS=BLOCKS,
        WIDTH=WIDTH,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )


def check_shape(logits: Tensor) -> tuple[int, int]:
    """Return (n, vocab). Raises ValueError if the last dimension is strided."""
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError("the last dimension of the logits must be contiguous")
    return logits.shape[0], logits.shape[1]


def _readable(logits: Tensor) -> int:
    """Return the readable numbers of a row: padded and aligned rows are read by full wide loads."""
    vocab = logits.shape[1]
    padded = -(-vocab // ALIGNED) * ALIGNED
    is_aligned = logits.stride(0) % ALIGNED == 0 and logits.storage_offset() % ALIGNED == 0
    return padded if is_aligned and logits.stride(0) >= padded else vocab


# Numbers


@triton.jit
def _exponent_scale(temperature):
    """Return the factor from logit differences to exponents of 2, bounded so that 0 stays 0."""
    return LOG2_E * tl.minimum(1.0 / tl.maximum(temperature, 1e-30), 1e30)


@triton.jit
def _are_filtered(top_k, top_p, min_p, vocab):
    return (top_k > 0) & (top_k < vocab) | (top_p < 1) | (min_p > 0)


@triton.jit
def _key(seed, position):
    """Return two uint32 of seed and position: SplitMix64's finalizer (Steele et al., 2014)."""
    x = seed.to(tl.uint64) + (position.to(tl.int64) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _exponentials(low, high, token):
    """Return the tokens' exponential numbers in units of ln 2, by `reference.exponentials`."""
    x = token.to(tl.uint32) * 0x9E3779B9 + low
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ high) * 0xD35A2D97
    x = x ^ (x >> 15)
    v = x.to(tl.float32) * (1.0 / 4294967296.0) + (1.0 / 8589934592.0)
    v = tl.minimum(v, 1.0 - 1.0 / 16777216.0)
    # Near 0, where 1 - v would be rounded, five terms of the series of -log(1 - v).
    series = v * (LOG2_E / 5) + LOG2_E / 4
    series = series * v + LOG2_E / 3
    series = series * v + LOG2_E / 2
    series = series * v + LOG2_E
    return tl.where(v < 0.0625, series * v, -_log2(1.0 - v))


@triton.jit
def _log2(x):
    """Return log2(x), by one instruction: `tl.log2` takes twenty, for its last bits."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _to_key(x):
    """Return an int32 with the order of the fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _from_key(key):
    bits = tl.where(key < 0, -key | -2147483648, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _upper_middle(low, high):
    """Return (low + high + 1) // 2 without overflow."""
    return (low | high) - ((low ^ high) >> 1)


# The pass over the logits


@triton.jit(
    do_not_specialize=["num_statistics"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"]
)
def _statistics_kernel(
    logits_ptr,
    row_ptr,
    position_ptr,
    float_ptr,
    int_ptr,
    statistics_ptr,
    index_ptr,
    logits_stride,
    float_stride,
    int_stride,
    vocab,
    readable,
    num_blocks,
    num_statistics,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce BLOCKS blocks of a row to greatest logits, sums of weights, winners and their times.

    The sums are of rows with filters alone. NaN makes a block's time -1. At temperature 0, the
    first of the greatest logits wins, at time 0."""
    release(PDL)
    wait(PDL)
    entry = tl.program_id(1).to(tl.int64)
    position = tl.load(position_ptr + entry)
    if position < 0:
        return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    pointers = logits_ptr + entry * logits_stride + token
    logits = tl.load(pointers, mask=token < readable, other=-float("inf")).to(tl.float32)
    if PADDED:  # noqa: SIM102  # decided by the compiler, the next by the GPU
        if (tl.program_id(0) + 1) * BLOCKS * WIDTH > vocab:
            logits = tl.where(token < vocab, logits, -float("inf"))
    row = tl.load(row_ptr + entry).to(tl.int64)
    temperature = tl.load(float_ptr + row * float_stride)
    top_p = tl.load(float_ptr + row * float_stride + 1)
    min_p = tl.load(float_ptr + row * float_stride + 2)
    top_k = tl.load(int_ptr + row * int_stride)
    seed = tl.load(int_ptr + row * int_stride + 1)
    scale = _exponent_scale(temperature)
    greatest = tl.max(logits, 1)
    exponents = (logits - tl.maximum(greatest, -3e38)[:, None]) * scale
    live = block < num_blocks
    place = statistics_ptr + entry * num_blocks + block
    times = -exponents
    if temperature > 0:
        if _are_filtered(top_k, top_p, min_p, vocab):
            tl.store(place + num_statistics, tl.sum(tl.exp2(exponents), 1), mask=live)
        low, high = _key(seed, position)
        times = _exponentials(low, high, token) * tl.exp2(-exponents)
    times = tl.where(logits == logits, times, -1.0)
    first = tl.min(times, 1)
    winner = tl.min(tl.where(times == first[:, None], token, 2147483647), 1)
    tl.store(place, greatest, mask=live)
    tl.store(place + 2 * num_statistics, first, mask=live)
    tl.store(index_ptr + entry * num_blocks + block, winner, mask=live)


# The choice: one program per row


@triton.jit(
    do_not_specialize=["num_statistics"],
    do_not_specialize_on_alignment=["row_ptr", "position_ptr", "out_ptr"],
)
def _choose_kernel(
    logits_ptr,
    row_ptr,
    position_ptr,
    float_ptr,
    int_ptr,
    token_ptr,
    out_ptr,
    statistics_ptr,
    index_ptr,
    logits_stride,
    float_stride,
    int_stride,
    token_stride,
    vocab,
    readable,
    num_blocks,
    num_statistics,
    PADDED: tl.constexpr,
    TRAILING_ZEROS: tl.constexpr,
    NUM_BLOCKS_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    entry = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + entry)
    row = tl.load(row_ptr + entry).to(tl.int64)
    statistics_ptr += entry * num_blocks
    index_ptr += entry * num_blocks
    block = tl.arange(0, NUM_BLOCKS_PAD)
    live = block < num_blocks
    greatest = tl.load(statistics_ptr + block, mask=live, other=-float("inf"))
    times = tl.load(statistics_ptr + 2 * num_statistics + block, mask=live, other=float("inf"))
    winners = tl.load(index_ptr + block, mask=live, other=0)
    if position < 0:
        tl.store(out_ptr + entry, NOT_SAMPLED)
        return
    temperature = tl.load(float_ptr + row * float_stride)
    top_p = tl.load(float_ptr + row * float_stride + 1)
    min_p = tl.load(float_ptr + row * float_stride + 2)
    top_k = tl.load(int_ptr + row * int_stride)
    seed = tl.load(int_ptr + row * int_stride + 1)
    scale = _exponent_scale(temperature)

    best = tl.max(greatest, 0)
    is_finite = (tl.min(times, 0) >= 0) & (best > -float("inf")) & (best < float("inf"))
    chosen = tl.full([], NOT_FINITE, tl.int32)
    if is_finite:
        # Relative to the row's greatest logit.
        times = tl.where(greatest > -float("inf"), times, float("inf"))
        if temperature > 0:
            times *= tl.exp2((best - greatest) * scale)
        else:
            times = tl.where(greatest == best, 0.0, float("inf"))
        if (temperature > 0) & _are_filtered(top_k, top_p, min_p, vocab):
            chosen = _choose_filtered(
                logits_ptr + entry * logits_stride,
                index_ptr + num_statistics,
                statistics_ptr + num_statistics,
                greatest,
                times,
                winners,
                best,
                scale,
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                position,
                vocab,
                readable,
                num_blocks,
                PADDED,
                TRAILING_ZEROS,
                BLOCKS,
                WIDTH,
            )
        else:
            _, chosen = _first(times, winners)
    tl.store(out_ptr + entry, chosen)
    if token_ptr is not None:
        tl.store(token_ptr + row * token_stride + position, tl.maximum(chosen, 0))


@triton.jit
def _first(times, tokens):
    """Return (least time, its token), the least token of equals."""
    time = tl.min(times, 0)
    return time, tl.min(tl.where(times == time, tokens, 2147483647), 0)


@triton.jit
def _choose_filtered(
    logits_ptr,
    list_ptr,
    mass_ptr,
    greatest,
    times,
    winners,
    best,
    scale,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    vocab,
    readable,
    num_blocks,
    PADDED: tl.constexpr,
    TRAILING_ZEROS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the first token that passes top-k, min-p and top-p.

    times, winners: of each block. Times and weights are relative to the greatest logit."""
    live = tl.arange(0, greatest.shape[0]) < num_blocks
    winner_logits = tl.load(logits_ptr + winners, mask=live, other=-float("inf")).to(tl.float32)
    least = tl.full([], -float("inf"), tl.float32)
    limited = (top_k > 0) & (top_k < vocab)
    if limited:
        bound = _kth_greatest_block(greatest, best, top_k, TRAILING_ZEROS)
        listed = _list_blocks(list_ptr, live & (greatest >= bound))
        least = _kth_greatest(
            logits_ptr,
            list_ptr,
            listed,
            bound,
            best,
            top_k,
            vocab,
            readable,
            PADDED,
            TRAILING_ZEROS,
            BLOCKS,
            WIDTH,
        )
    if min_p > 0:
        least = tl.maximum(least, best + temperature * tl.log(min_p))
    limit = tl.full([], 0.0, tl.float64)
    if top_p < 1:
        masses = _load_masses(mass_ptr, live) * tl.exp2((greatest - best) * scale)
        count = tl.full([], 0, tl.int32)
        if least > -float("inf"):
            listed = _list_blocks(list_ptr, live & (greatest >= least))
            count = _weigh(
                logits_ptr,
                list_ptr,
                mass_ptr,
                listed,
                least,
                -float("inf"),
                best,
                scale,
                vocab,
                readable,
                PADDED,
                BLOCKS,
                WIDTH,
            )
            masses = _load_masses(mass_ptr, live & (greatest >= least))
        limit = tl.sum(masses.to(tl.float64), 0)
        if limited & (least > -float("inf")):
            # Ties at the k-th place are kept, but do not count for top-p.
            surplus = tl.maximum(count - top_k, 0)
            limit -= surplus.to(tl.float64) * tl.exp2((least - best) * scale)
        limit *= top_p

    low, high = _key(seed, position)
    above = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    searching = tl.full([], 1, tl.int1)
    while searching:
        # Winners that count stand. An earlier winner that does not hides others of its block.
        counts = (winner_logits >= least) & (winner_logits > above)
        first, token = _first(tl.where(counts, times, float("inf")), winners)
        hidden = ~counts & (greatest >= least) & (greatest > above) & (times <= first)
        listed = _list_blocks(list_ptr, live & hidden)
        if listed > 0:
            token = _race(
                logits_ptr,
                list_ptr,
                listed,
                first,
                token,
                low,
                high,
                least,
                above,
                best,
                scale,
                vocab,
                readable,
                PADDED,
                BLOCKS,
                WIDTH,
            )
        searching = False
        if top_p < 1:
            logit = tl.load(logits_ptr + token).to(tl.float32)
            likelier = live & (greatest > logit)
            listed = _list_blocks(list_ptr, likelier)
            _weigh(
                logits_ptr,
                list_ptr,
                mass_ptr,
                listed,
                least,
                logit,
                best,
                scale,
                vocab,
                readable,
                PADDED,
                BLOCKS,
                WIDTH,
            )
            masses = _load_masses(mass_ptr, likelier)
            searching = (listed > 0) & (tl.sum(masses.to(tl.float64), 0) >= limit)
            above = logit
    return token


@triton.jit
def _race(
    logits_ptr,
    list_ptr,
    listed,
    first,
    winner,
    low,
    high,
    least,
    above,
    best,
    scale,
    vocab,
    readable,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the first of `winner`, whose time is `first`, and the tokens of the listed blocks.

    Only logits >= least and > above count."""
    times = tl.full([BLOCKS, WIDTH], float("inf"), tl.float32)
    tokens = tl.full([BLOCKS, WIDTH], 2147483647, tl.int32)
    _, token, ahead = _load_listed(logits_ptr, list_ptr, 0, listed, readable, BLOCKS, WIDTH)
    for start in range(0, listed, BLOCKS):
        logits, own = _widen(ahead, token, vocab, PADDED), token
        _, token, ahead = _load_listed(
            logits_ptr, list_ptr, start + BLOCKS, listed, readable, BLOCKS, WIDTH
        )
        time = _exponentials(low, high, own) * tl.exp2((best - logits) * scale)
        time = tl.where((logits >= least) & (logits > above), time, float("inf"))
        tokens = tl.where(time < times, own, tokens)
        times = tl.minimum(time, times)
    earliest = tl.min(tl.min(times, 1), 0)
    found = tl.min(tl.min(tl.where(times == earliest, tokens, 2147483647), 1), 0)
    return tl.where(earliest < first, found, winner)


@triton.jit
def _kth_greatest_block(greatest, best, k, TRAILING_ZEROS: tl.constexpr):
    """Return a bound that at least k logits reach: the k-th greatest block maximum, or -inf."""
    low = _to_key(tl.full([], -float("inf"), tl.float32)) >> TRAILING_ZEROS
    high = _to_key(best) >> TRAILING_ZEROS
    while low < high:
        middle = _upper_middle(low, high)
        count = tl.sum((greatest >= _from_key(middle << TRAILING_ZEROS)).to(tl.int32), 0)
        if count >= k:
            low = middle
            if count == k:
                high = middle
        else:
            high = middle - 1
    return _from_key(low << TRAILING_ZEROS)


@triton.jit
def _kth_greatest(
    logits_ptr,
    list_ptr,
    listed,
    bound,
    best,
    k,
    vocab,
    readable,
    PADDED: tl.constexpr,
    TRAILING_ZEROS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return a threshold >= `bound` that only the k greatest logits and their equals reach.

    Bisects the ordered fp32 numbers. A middle that exactly k logits reach is the threshold."""
    low = _to_key(bound) >> TRAILING_ZEROS
    high = _to_key(best) >> TRAILING_ZEROS
    while low < high:
        middle = _upper_middle(low, high)
        threshold = _from_key(middle << TRAILING_ZEROS)
        counts = tl.zeros([BLOCKS, WIDTH], tl.int32)
        _, token, ahead = _load_listed(logits_ptr, list_ptr, 0, listed, readable, BLOCKS, WIDTH)
        for start in range(0, listed, BLOCKS):
            logits = _widen(ahead, token, vocab, PADDED)
            _, token, ahead = _load_listed(
                logits_ptr, list_ptr, start + BLOCKS, listed, readable, BLOCKS, WIDTH
            )
            counts += (logits >= threshold).to(tl.int32)
        count = tl.sum(tl.sum(counts, 1), 0)
        if count >= k:
            low = middle
            if count == k:
                high = middle
        else:
            high = middle - 1
    return _from_key(low << TRAILING_ZEROS)


@triton.jit
def _list_blocks(list_ptr, wanted):
    """Write the indices of the wanted blocks into the list, in order. Return their number."""
    size: tl.constexpr = wanted.shape[0]
    place = tl.cumsum(wanted.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(list_ptr + place, tl.arange(0, size), mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _load_listed(
    logits_ptr, list_ptr, start, listed, readable, BLOCKS: tl.constexpr, WIDTH: tl.constexpr
):
    """Return (BLOCKS listed blocks, their tokens `[BLOCKS, WIDTH]`, their logits).

    Logits past the list's end are -inf. Loops call this a step ahead and widen the logits when they
    use them, to hide the latency of memory."""
    place = start + tl.arange(0, BLOCKS)
    block = tl.load(list_ptr + place, mask=place < listed, other=0)
    token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    known = (place < listed)[:, None] & (token < readable)
    return block, token, tl.load(logits_ptr + token, mask=known, other=-float("inf"))


@triton.jit
def _widen(logits, token, vocab, PADDED: tl.constexpr):
    """Convert to fp32, with -inf for the padding read by a wide load."""
    logits = logits.to(tl.float32)
    if PADDED:
        logits = tl.where(token < vocab, logits, -float("inf"))
    return logits


@triton.jit
def _weigh(
    logits_ptr,
    list_ptr,
    mass_ptr,
    listed,
    least,
    above,
    best,
    scale,
    vocab,
    readable,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum the weights of logits >= least and > above, per listed block. Return their number."""
    counts = tl.zeros([BLOCKS, WIDTH], tl.int32)
    tl.debug_barrier()  # all threads have read the previous masses
    block, token, ahead = _load_listed(logits_ptr, list_ptr, 0, listed, readable, BLOCKS, WIDTH)
    for start in range(0, listed, BLOCKS):
        logits = _widen(ahead, token, vocab, PADDED)
        place = mass_ptr + block
        block, token, ahead = _load_listed(
            logits_ptr, list_ptr, start + BLOCKS, listed, readable, BLOCKS, WIDTH
        )
        wanted = (logits >= least) & (logits > above)
        weights = tl.where(wanted, tl.exp2((logits - best) * scale), 0.0)
        tl.store(place, tl.sum(weights, 1), mask=start + tl.arange(0, BLOCKS) < listed)
        counts += wanted.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(tl.sum(counts, 1), 0)


@triton.jit
def _load_masses(mass_ptr, weighed):
    size: tl.constexpr = weighed.shape[0]
    return tl.load(mass_ptr + tl.arange(0, size), mask=weighed, other=0.0)
