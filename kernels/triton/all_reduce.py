"""Sums and gathered rows over the ranks of a group, through memory that each GPU has of the others': one kernel, no call of a library.

Each rank has a buffer that its peers can read and write (`Peers`). There are three ways to a sum:
- one-shot: a program copies its share of x into its own place in the buffer, tells the peers' programs of the same number, waits until they
  have told it, and reads theirs;
- two-shot: it then reads a part of which it is the one to add up, and after a second wait the sums of the other parts from the
  ranks that did: fewer bytes where there are more than two ranks;
- pushed: it writes its share into the peers' places, each four bytes beside the number of the call, and looks at its own until every
  word has come: twice the bytes, and one trip instead of three.
All ranks add in the order of the ranks, so that they have the very same bits.

Places of sums alternate between two from call to call. A rank that writes to one again has had something of every peer in the call in
between, which those have entered only after they had read that place: nothing else needs to be waited for.
"""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pdl import release, supported, wait

PROGRAMS = 256
"""At most. They wait for those of the same number on the other GPUs, so all of them should run at once: two on a multiprocessor."""
PLACE = 2**18
"""Bytes of a program's place."""
MOST_BYTES = PROGRAMS * PLACE
"""Of one sum."""
GATHERED = 2048
"""Numbers of a row that a program brings to the others at a time."""
PUSHED_ROWS = 128
"""At most: a program for each."""
PUSHED_WIDTH = 8192
"""Numbers of 16 bits in a row, at most."""
FLAGS_AT = 2 * MOST_BYTES
"""Where in a buffer the flags are: for each program and rank the number of the last call that it has told of."""
PUSHED_AT = FLAGS_AT + 4 * 8 * PROGRAMS
"""Where in a buffer what is pushed comes: two places for each row, with words of 8 bytes from each rank."""


def buffer_bytes(size: int) -> int:
    """Of each rank's buffer in a group of up to 8 ranks. It is zero at first."""
    return PUSHED_AT + 2 * PUSHED_ROWS * size * (4 * PUSHED_WIDTH)


@dataclass(frozen=True, slots=True)
class Peers:
    """The buffers of a group's ranks."""

    rank: int
    size: int
    addresses: Tensor
    """Of each rank's buffer, int64 [size]."""
    calls: Tensor
    """This rank's counts of calls for each program, int32 [2, PROGRAMS], zero at first: of those with flags, and of pushed ones. So
    what a program looks at is never older than the call before, and counts may wrap around.
    """


def fits(x: Tensor, size: int, two_shot: bool = False) -> bool:
    """Whether `all_reduce` takes x in a group of `size` ranks."""
    parts = size if two_shot else 1
    _, block, rounds = _blocks(x, parts)
    return x.is_contiguous() and rounds * block * parts * x.element_size() <= PLACE


def _blocks(x: Tensor, parts: int) -> tuple[int, int, int]:
    """(programs, numbers in a block, blocks of each part that a program has)."""
    num_programs = min(PROGRAMS, triton.cdiv(x.numel(), 1024 * parts))
    each = triton.cdiv(x.numel(), num_programs * parts)
    block = max(1024, min(8192, triton.next_power_of_2(each)))
    return num_programs, block, triton.cdiv(each, block)


def all_reduce(x: Tensor, peers: Peers, two_shot: bool = False) -> Tensor:
    """The sum of all ranks' x, added in fp32; an x that `fits`, and of the same size everywhere. Every rank calls this in the same
    order.
    """
    if not fits(x, peers.size, two_shot):
        raise ValueError(f"{x.nbytes} bytes are more than all_reduce sums up, or not in one piece")
    out = torch.empty_like(x)
    num_programs, block, rounds = _blocks(x, peers.size if two_shot else 1)
    pdl = supported(x.device)
    _all_reduce_kernel[(num_programs,)](
        x,
        out,
        peers.addresses,
        peers.calls[0],
        x.numel(),
        rounds,
        RANK=peers.rank,
        SIZE=peers.size,
        TWO_SHOT=two_shot,
        BLOCK=block,
        PROGRAMS=PROGRAMS,
        PLACE=PLACE // x.element_size(),
        FLAGS_AT=FLAGS_AT,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(4, min(16, block // 256)),
    )
    return out


def fits_norm(x: Tensor) -> bool:
    """Whether `all_reduce_norm` takes x, [num_tokens, size]."""
    return _norm_rows(x) * x.shape[1] * x.element_size() <= PLACE


def _norm_rows(x: Tensor) -> int:
    """Of a program."""
    return -(-len(x) // PROGRAMS)


def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, peers: Peers
) -> tuple[Tensor, Tensor]:
    """(norm(total), total), total being the sum of all ranks' x, plus residual; as `norm.add_rms_norm` and, with a bias,
    `norm.add_layer_norm`. x, residual: [num_tokens, size], contiguous, x for which `fits_norm`. The total is written into `residual`.
    """
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    block = triton.next_power_of_2(size)
    pdl = supported(x.device)
    _all_reduce_norm_kernel[(min(num_tokens, PROGRAMS),)](
        x,
        residual,
        weight,
        weight if bias is None else bias,
        out,
        peers.addresses,
        peers.calls[0],
        num_tokens,
        _norm_rows(x),
        eps,
        WIDTH=size,
        RANK=peers.rank,
        SIZE=peers.size,
        CENTERED=bias is not None,
        BLOCK=block,
        PROGRAMS=PROGRAMS,
        PLACE=PLACE // x.element_size(),
        FLAGS_AT=FLAGS_AT,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(4, min(16, block // 256)),
    )
    return out, residual


def fits_push(x: Tensor) -> bool:
    """Whether `pushed_norm` takes x, [num_tokens, size]."""
    num_tokens, size = x.shape
    return x.itemsize == 2 and num_tokens <= PUSHED_ROWS and size <= PUSHED_WIDTH and size % 2 == 0


def pushed_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, peers: Peers
) -> tuple[Tensor, Tensor]:
    """As `all_reduce_norm`, pushed; x for which `fits_push`."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    pairs = triton.next_power_of_2(size // 2)
    pdl = supported(x.device)
    _pushed_norm_kernel[(num_tokens,)](
        x.view(torch.int32),
        residual.view(torch.int32),
        weight.view(torch.int32),
        (weight if bias is None else bias).view(torch.int32),
        out.view(torch.int32),
        peers.addresses,
        peers.calls[1],
        eps,
        TYPE=tl.float16 if x.dtype == torch.float16 else tl.bfloat16,
        HALF=size // 2,
        RANK=peers.rank,
        SIZE=peers.size,
        CENTERED=bias is not None,
        PAIRS=pairs,
        ROWS=PUSHED_ROWS,
        WORDS=PUSHED_WIDTH // 2,
        PUSHED_AT=PUSHED_AT,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(4, min(16, pairs // 128)),
    )
    return out, residual


def all_gather(x: Tensor, out: Tensor, outs: Tensor, peers: Peers) -> None:
    """Puts all ranks' x, `[n, width]`, side by side, in rank order, into every rank's `out`, `[n, size * width]`, of which `outs` has the
    addresses, int64 [size]. All contiguous and of one type; the same calls everywhere, as with sums.

    A rank's `out` is written as soon as another one comes here: between its last reader and the next call there has to be a sum.

    Raises ValueError for an `out` of another shape, and for what is not in one piece.
    """
    num_rows, width = x.shape
    if (
        not x.is_contiguous()
        or not out.is_contiguous()
        or out.shape != (num_rows, peers.size * width)
    ):
        raise ValueError(
            f"{list(x.shape)} of {peers.size} ranks do not fill {list(out.shape)}, or not in one piece"
        )
    num_tiles = num_rows * triton.cdiv(width, GATHERED)
    pdl = supported(x.device)
    _all_gather_kernel[(min(PROGRAMS, num_tiles),)](
        x,
        outs,
        peers.addresses,
        peers.calls[0],
        num_tiles,
        width,
        RANK=peers.rank,
        SIZE=peers.size,
        BLOCK=GATHERED,
        FLAGS_AT=FLAGS_AT,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )


@triton.jit
def _place(
    addresses_ptr, rank, call, TYPE: tl.constexpr, PROGRAMS: tl.constexpr, PLACE: tl.constexpr
):
    """Where a rank keeps this program's share in this call."""
    buffer = tl.load(addresses_ptr + rank).to(tl.pointer_type(TYPE))
    return tl.multiple_of(buffer + ((call & 1) * PROGRAMS + tl.program_id(0)) * PLACE, 16)


@triton.jit
def _meet(addresses_ptr, told, RANK: tl.constexpr, SIZE: tl.constexpr, FLAGS_AT: tl.constexpr):
    """What all ranks' programs of this number have written before is visible after. `told`: rises from meeting to meeting."""
    tl.debug_barrier()
    mine = tl.program_id(0) * SIZE
    for step in tl.static_range(1, SIZE):
        peer = (RANK + step) % SIZE
        flags = (tl.load(addresses_ptr + peer) + FLAGS_AT).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + mine + RANK, told, sem="release", scope="sys")
    flags = (tl.load(addresses_ptr + RANK) + FLAGS_AT).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, SIZE):
        peer = (RANK + step) % SIZE
        while tl.atomic_add(flags + mine + peer, 0, sem="acquire", scope="sys") - told < 0:
            pass
    tl.debug_barrier()


@triton.jit
def _all_reduce_kernel(
    x_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    size,
    rounds,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PLACE: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    PDL: tl.constexpr,
):
    """`rounds` blocks for each part of x, of which there are as many as ranks in a two-shot sum, else one."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = SIZE if TWO_SHOT else 1
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin = program * rounds * (PARTS * BLOCK)
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + program) + 1
    own = _place(addresses_ptr, RANK, call, TYPE, PROGRAMS, PLACE)
    for i in range(rounds * PARTS):
        at = i * BLOCK + lane
        tl.store(own + at, tl.load(x_ptr + begin + at, mask=begin + at < size, other=0.0))
    _meet(addresses_ptr, 2 * call, RANK, SIZE, FLAGS_AT)
    for i in range(rounds):
        at = (i * PARTS + (RANK if TWO_SHOT else 0)) * BLOCK + lane
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            place = _place(addresses_ptr, rank, call, TYPE, PROGRAMS, PLACE)
            total += tl.load(place + at, cache_modifier=".cg").to(tl.float32)
        if TWO_SHOT:
            tl.store(own + at, total.to(TYPE))
        tl.store(out_ptr + begin + at, total.to(TYPE), mask=begin + at < size)
    if TWO_SHOT:
        _meet(addresses_ptr, 2 * call + 1, RANK, SIZE, FLAGS_AT)
        for i in range(rounds):
            for step in tl.static_range(1, SIZE):
                rank = (RANK + step) % SIZE
                at = (i * PARTS + rank) * BLOCK + lane
                place = _place(addresses_ptr, rank, call, TYPE, PROGRAMS, PLACE)
                summed = tl.load(place + at, cache_modifier=".cg")
                tl.store(out_ptr + begin + at, summed, mask=begin + at < size)
    tl.store(calls_ptr + program, call)


@triton.jit(do_not_specialize=["num_tiles"])
def _all_gather_kernel(
    x_ptr,
    outs_ptr,
    addresses_ptr,
    calls_ptr,
    num_tiles,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles program, program + programs, ...: BLOCK numbers of a row each."""
    program = tl.program_id(0)
    tiles_of_row = tl.cdiv(width, BLOCK)
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + program) + 1
    for tile in range(program, num_tiles, tl.num_programs(0)):
        row = (tile // tiles_of_row).to(tl.int64)
        column = tile % tiles_of_row * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * width + column, mask=column < width)
        at = (row * SIZE + RANK) * width + column
        for step in tl.static_range(SIZE):
            out = tl.load(outs_ptr + (RANK + step) % SIZE).to(
                tl.pointer_type(x_ptr.dtype.element_ty)
            )
            tl.store(tl.multiple_of(out, 16) + at, x, mask=column < width)
    _meet(addresses_ptr, 2 * call, RANK, SIZE, FLAGS_AT)
    tl.store(calls_ptr + program, call)


@triton.jit
def _all_reduce_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    num_tokens,
    rows,
    eps,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PLACE: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows program, program + programs, ...: `rows` of them at most."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if CENTERED:
        bias = tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + program) + 1
    own = _place(addresses_ptr, RANK, call, TYPE, PROGRAMS, PLACE)
    for i in range(rows):
        row = program + i * num_programs
        mask = live & (row < num_tokens)
        x = tl.load(x_ptr + row.to(tl.int64) * WIDTH + column, mask=mask)
        tl.store(own + i * WIDTH + column, x, mask=mask)
    _meet(addresses_ptr, 2 * call, RANK, SIZE, FLAGS_AT)
    for i in range(rows):
        row = program + i * num_programs
        mask = live & (row < num_tokens)
        at = row.to(tl.int64) * WIDTH + column
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            place = _place(addresses_ptr, rank, call, TYPE, PROGRAMS, PLACE)
            total += tl.load(
                place + i * WIDTH + column, mask=mask, other=0.0, cache_modifier=".cg"
            ).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        # Rounded as a sum of its own would be: what follows does not depend on which kernel adds up.
        stream = (total.to(TYPE).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + at, stream, mask=mask)
        y = stream.to(tl.float32)
        if CENTERED:
            y = tl.where(live, y - tl.sum(y, 0) / WIDTH, 0.0)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps) * weight
        if CENTERED:
            y += bias
        tl.store(out_ptr + at, y.to(TYPE), mask=mask)
    tl.store(calls_ptr + program, call)


@triton.jit
def _halves(pairs, TYPE: tl.constexpr):
    """Of the numbers at even places, and at odd ones, what each is in fp32."""
    even = (pairs & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    odd = (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def _pairs(even, odd, TYPE: tl.constexpr):
    """The reverse."""
    low = even.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = odd.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low | high


@triton.jit
def _rounded(x, TYPE: tl.constexpr):
    return x.to(TYPE).to(tl.float32)


@triton.jit
def _pushed_place(
    addresses_ptr,
    to,
    sender,
    call,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    AT: tl.constexpr,
):
    """Where a rank gets this row from the sender in this call."""
    words = (tl.load(addresses_ptr + to) + AT).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(
        words + (((call & 1) * ROWS + tl.program_id(0)) * SIZE + sender) * WORDS, 16
    )


@triton.jit
def _pushed_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    eps,
    TYPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PUSHED_AT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row. All tensors are pairs of numbers: HALF of them in a row."""
    row = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    live = lane < HALF
    weight, odd_weight = _halves(tl.load(weight_ptr + lane, mask=live, other=0), TYPE)
    if CENTERED:
        bias, odd_bias = _halves(tl.load(bias_ptr + lane, mask=live, other=0), TYPE)
    at = row * HALF + lane
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + row) + 1
    told = call.to(tl.int64) << 32
    own = tl.load(x_ptr + at, mask=live, other=0)
    for step in tl.static_range(1, SIZE):
        place = _pushed_place(
            addresses_ptr, (RANK + step) % SIZE, RANK, call, SIZE, ROWS, WORDS, PUSHED_AT
        )
        tl.store(place + lane, told | (own.to(tl.int64) & 0xFFFFFFFF), mask=live)
    residual, odd_residual = _halves(tl.load(residual_ptr + at, mask=live, other=0), TYPE)
    total = tl.zeros([PAIRS], tl.float32)
    odd_total = tl.zeros([PAIRS], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            pairs = own
        else:
            place = _pushed_place(addresses_ptr, RANK, rank, call, SIZE, ROWS, WORDS, PUSHED_AT)
            words = tl.load(place + lane, mask=live, other=told, volatile=True)
            while tl.min((words >> 32).to(tl.int32) - call, 0) < 0:
                words = tl.load(place + lane, mask=live, other=told, volatile=True)
            pairs = words.to(tl.int32)
        even, odd = _halves(pairs, TYPE)
        total += even
        odd_total += odd
    y = _rounded(_rounded(total, TYPE) + residual, TYPE)
    odd_y = _rounded(_rounded(odd_total, TYPE) + odd_residual, TYPE)
    tl.store(residual_ptr + at, _pairs(y, odd_y, TYPE), mask=live)
    if CENTERED:
        mean = tl.sum(y + odd_y, 0) / (2 * HALF)
        y = tl.where(live, y - mean, 0.0)
        odd_y = tl.where(live, odd_y - mean, 0.0)
    scale = tl.rsqrt(tl.sum(y * y + odd_y * odd_y, 0) / (2 * HALF) + eps)
    y *= scale * weight
    odd_y *= scale * odd_weight
    if CENTERED:
        y += bias
        odd_y += odd_bias
    tl.store(out_ptr + at, _pairs(y, odd_y, TYPE), mask=live)
    tl.store(calls_ptr + row, call)
