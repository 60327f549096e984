"""Sums and gathered rows over the ranks of a group, by kernels through memory that the GPUs share.

Each rank has a buffer that its peers can read and write (`Peers`). There are three algorithms for a
sum:
- one-shot: a program copies its part of x into its own slot in the buffer, signals the peers'
  programs of the same index, waits for their signals, and reads their slots;
- two-shot: it reads only the part that its rank adds up, and after a second barrier the sums of the
  other parts from their ranks: fewer bytes with more than two ranks;
- pushed: it writes its part into the peers' slots, each four bytes next to the number of the call,
  and polls its own slots until every word has arrived: twice the bytes, one trip instead of three.
All ranks add in rank order, so their results are bitwise the same.

Sums alternate between two slots from call to call. A rank that writes to a slot again has received
something from every peer in the call in between, which the peers entered only after they had read
that slot. So no other synchronization is needed."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.reference import Norm

from .norm import load_parameter, normalize
from .pdl import release, supported, wait

MAX_PROGRAMS = 256
"""Most programs of a call. They wait for each other, so all must run at once: two per processor."""
SLOT_BYTES = 2**18  # bytes of a program's slot
MAX_BYTES = MAX_PROGRAMS * SLOT_BYTES  # most bytes of a sum
GATHER_WIDTH = 2048  # numbers of a row that a program sends at a time
MAX_PUSHED_ROWS = 128  # most rows of a pushed sum: one program per row
MAX_PUSHED_WIDTH = 8192  # most numbers of 16 bits in a row of a pushed sum
FLAGS_OFFSET = 2 * MAX_BYTES
"""Offset of the flags in a buffer: by program and rank, the last call that was signalled."""
PUSHED_OFFSET = FLAGS_OFFSET + 4 * 8 * MAX_PROGRAMS
"""Offset of pushed rows in a buffer: two slots per row, with words of 8 bytes from each rank."""


def buffer_bytes(size: int) -> int:
    """Return the size of a rank's buffer, for up to 8 ranks. It must be zeroed."""
    return PUSHED_OFFSET + 2 * MAX_PUSHED_ROWS * size * (4 * MAX_PUSHED_WIDTH)


@dataclass(frozen=True, slots=True)
class Peers:
    """The buffers of a group's ranks."""

    rank: int
    size: int
    addresses: Tensor  # of each rank's buffer, int64 [size]
    calls: Tensor
    """Calls by program of this rank, int32 [2, MAX_PROGRAMS]: with flags, and pushed.

    What a program reads is never older than the call before, so counts may wrap around."""


def make_peers(rank: int, addresses: Tensor) -> Peers:
    """Return a rank's peers. addresses: of all ranks' zeroed buffers, int64 `[size]`."""
    calls = torch.zeros(2, MAX_PROGRAMS, dtype=torch.int32, device=addresses.device)
    return Peers(rank, len(addresses), addresses, calls)


def release_peers(buffer: Tensor, peers: Peers) -> None:
    """End kernels that wait for a lost rank, by flags in this rank's buffer. Later sums are wrong.

    Must run on another stream: the kernels block theirs."""
    flag_calls, pushed_calls = peers.calls.cpu()
    flags = buffer[FLAGS_OFFSET:][: 4 * peers.size * MAX_PROGRAMS].view(torch.int32)
    flags.copy_((2 * flag_calls + 2**30)[:, None].expand(-1, peers.size).reshape(-1))
    words = buffer[PUSHED_OFFSET:].view(torch.int64).view(2, MAX_PUSHED_ROWS, -1)
    call_numbers = (pushed_calls[:MAX_PUSHED_ROWS] + 2**30).long() << 32
    words.copy_(call_numbers[None, :, None].expand_as(words))


def fits(x: Tensor, size: int, two_shot: bool = False) -> bool:
    """Return True if `all_reduce` supports x in a group of `size` ranks."""
    parts = size if two_shot else 1
    _, block, rounds = _blocks(x, parts)
    return x.is_contiguous() and rounds * block * parts * x.element_size() <= SLOT_BYTES


def _blocks(x: Tensor, parts: int) -> tuple[int, int, int]:
    """Return (programs, numbers per block, blocks per program and part)."""
    num_programs = min(MAX_PROGRAMS, triton.cdiv(x.numel(), 1024 * parts))
    each = triton.cdiv(x.numel(), num_programs * parts)
    block = max(1024, min(8192, triton.next_power_of_2(each)))
    return num_programs, block, triton.cdiv(each, block)


def all_reduce(x: Tensor, peers: Peers, two_shot: bool = False) -> Tensor:
    """Return the sum of all ranks' x, added in fp32. x must pass `fits`.

    All ranks make the same calls, with x of the same size."""
    if not fits(x, peers.size, two_shot):
        raise ValueError(f"x of {x.nbytes} bytes is too large for all_reduce, or not contiguous")
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
        MAX_PROGRAMS=MAX_PROGRAMS,
        SLOT_SIZE=SLOT_BYTES // x.element_size(),
        FLAGS_OFFSET=FLAGS_OFFSET,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(4, min(16, block // 256)),
    )
    return out


def fits_norm(x: Tensor) -> bool:
    """Return True if `all_reduce_norm` supports x, [num_tokens, size]."""
    return _norm_rows(x) * x.shape[1] * x.element_size() <= SLOT_BYTES


def _norm_rows(x: Tensor) -> int:
    """Return the rows per program."""
    return -(-len(x) // MAX_PROGRAMS)


def all_reduce_norm(x: Tensor, residual: Tensor, norm: Norm, peers: Peers) -> tuple[Tensor, Tensor]:
    """Return (norm(total), total), where total is the sum of all ranks' x, plus residual.

    x, residual: [num_tokens, size], contiguous; x must pass `fits_norm`. The total is rounded and
    written into `residual`. The norm is of the rounded total, in fp32."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    block = triton.next_power_of_2(size)
    pdl = supported(x.device)
    _all_reduce_norm_kernel[(min(num_tokens, MAX_PROGRAMS),)](
        x,
        residual,
        norm.weight,
        norm.bias,
        out,
        peers.addresses,
        peers.calls[0],
        num_tokens,
        _norm_rows(x),
        norm.eps,
        WIDTH=size,
        RANK=peers.rank,
        SIZE=peers.size,
        CENTERED=norm.is_centered,
        BLOCK=block,
        MAX_PROGRAMS=MAX_PROGRAMS,
        SLOT_SIZE=SLOT_BYTES // x.element_size(),
        FLAGS_OFFSET=FLAGS_OFFSET,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(4, min(16, block // 256)),
    )
    return out, residual


def fits_push(x: Tensor) -> bool:
    """Return True if `pushed_norm` supports x, [num_tokens, size]."""
    num_tokens, size = x.shape
    return (
        x.itemsize == 2
        and num_tokens <= MAX_PUSHED_ROWS
        and size <= MAX_PUSHED_WIDTH
        and size % 2 == 0
    )


def pushed_norm(x: Tensor, residual: Tensor, norm: Norm, peers: Peers) -> tuple[Tensor, Tensor]:
    """Compute `all_reduce_norm` by the pushed algorithm. x must pass `fits_push`."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    pairs = triton.next_power_of_2(size // 2)
    pdl = supported(x.device)
    _pushed_norm_kernel[(num_tokens,)](
        x.view(torch.int32),
        residual.view(torch.int32),
        _view_pairs(norm.weight),
        None if norm.bias is None else _view_pairs(norm.bias),
        out.view(torch.int32),
        peers.addresses,
        peers.calls[1],
        norm.eps,
        TYPE=tl.float16 if x.dtype == torch.float16 else tl.bfloat16,
        HALF=size // 2,
        RANK=peers.rank,
        SIZE=peers.size,
        CENTERED=norm.is_centered,
        PAIRS=pairs,
        ROWS=MAX_PUSHED_ROWS,
        WORDS=MAX_PUSHED_WIDTH // 2,
        PUSHED_OFFSET=PUSHED_OFFSET,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(4, min(16, pairs // 128)),
    )
    return out, residual


def _view_pairs(x: Tensor) -> Tensor:
    return x.view(torch.int64 if x.itemsize == 4 else torch.int32)


def all_gather(x: Tensor, out: Tensor, outs: Tensor, peers: Peers) -> None:
    """Concatenate all ranks' x, `[n, width]`, into every rank's `out`, `[n, size * width]`.

    outs: the addresses of the ranks' `out`, int64 [size]. All are contiguous and of one type. All
    ranks make the same calls.

    Other ranks write into a rank's `out` once they get here, so a sum must separate its last reader
    from the next call.

    Raises ValueError for an `out` of another shape, and for tensors that are not contiguous."""
    num_rows, width = x.shape
    if (
        not x.is_contiguous()
        or not out.is_contiguous()
        or out.shape != (num_rows, peers.size * width)
    ):
        raise ValueError(
            f"{list(x.shape)} of {peers.size} ranks do not fill {list(out.shape)}, or one is not "
            "contiguous"
        )
    num_tiles = num_rows * triton.cdiv(width, GATHER_WIDTH)
    pdl = supported(x.device)
    _all_gather_kernel[(min(MAX_PROGRAMS, num_tiles),)](
        x,
        outs,
        peers.addresses,
        peers.calls[0],
        num_tiles,
        width,
        RANK=peers.rank,
        SIZE=peers.size,
        BLOCK=GATHER_WIDTH,
        FLAGS_OFFSET=FLAGS_OFFSET,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=8,
    )


@triton.jit
def _slot(
    addresses_ptr,
    rank,
    call,
    TYPE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
):
    """Return the address of this program's slot in a rank's buffer, for this call."""
    buffer = tl.load(addresses_ptr + rank).to(tl.pointer_type(TYPE))
    return tl.multiple_of(buffer + ((call & 1) * MAX_PROGRAMS + tl.program_id(0)) * SLOT_SIZE, 16)


@triton.jit
def _barrier(
    addresses_ptr, signal, RANK: tl.constexpr, SIZE: tl.constexpr, FLAGS_OFFSET: tl.constexpr
):
    """Wait for the ranks' programs of this index, whose earlier writes are then visible.

    signal: a number that rises from barrier to barrier."""
    tl.debug_barrier()
    mine = tl.program_id(0) * SIZE
    for step in tl.static_range(1, SIZE):
        peer = (RANK + step) % SIZE
        flags = (tl.load(addresses_ptr + peer) + FLAGS_OFFSET).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + mine + RANK, signal, sem="release", scope="sys")
    flags = (tl.load(addresses_ptr + RANK) + FLAGS_OFFSET).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, SIZE):
        peer = (RANK + step) % SIZE
        while tl.atomic_add(flags + mine + peer, 0, sem="acquire", scope="sys") - signal < 0:
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
    MAX_PROGRAMS: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    FLAGS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum `rounds` blocks of each part of x: one part per rank in a two-shot sum, else one."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = SIZE if TWO_SHOT else 1
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin = program * rounds * (PARTS * BLOCK)
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + program) + 1
    own = _slot(addresses_ptr, RANK, call, TYPE, MAX_PROGRAMS, SLOT_SIZE)
    for i in range(rounds * PARTS):
        at = i * BLOCK + lane
        tl.store(own + at, tl.load(x_ptr + begin + at, mask=begin + at < size, other=0.0))
    _barrier(addresses_ptr, 2 * call, RANK, SIZE, FLAGS_OFFSET)
    for i in range(rounds):
        at = (i * PARTS + (RANK if TWO_SHOT else 0)) * BLOCK + lane
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            slot = _slot(addresses_ptr, rank, call, TYPE, MAX_PROGRAMS, SLOT_SIZE)
            total += tl.load(slot + at, cache_modifier=".cg").to(tl.float32)
        if TWO_SHOT:
            tl.store(own + at, total.to(TYPE))
        tl.store(out_ptr + begin + at, total.to(TYPE), mask=begin + at < size)
    if TWO_SHOT:
        _barrier(addresses_ptr, 2 * call + 1, RANK, SIZE, FLAGS_OFFSET)
        for i in range(rounds):
            for step in tl.static_range(1, SIZE):
                rank = (RANK + step) % SIZE
                at = (i * PARTS + rank) * BLOCK + lane
                slot = _slot(addresses_ptr, rank, call, TYPE, MAX_PROGRAMS, SLOT_SIZE)
                summed = tl.load(slot + at, cache_modifier=".cg")
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
    FLAGS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Send tiles program, program + programs, ...: BLOCK numbers of a row each."""
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
    _barrier(addresses_ptr, 2 * call, RANK, SIZE, FLAGS_OFFSET)
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
    MAX_PROGRAMS: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    FLAGS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum and norm rows program, program + programs, ...: `rows` of them at most."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    weight = load_parameter(weight_ptr, column, live)
    bias = load_parameter(bias_ptr, column, live)
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + program) + 1
    own = _slot(addresses_ptr, RANK, call, TYPE, MAX_PROGRAMS, SLOT_SIZE)
    for i in range(rows):
        row = program + i * num_programs
        mask = live & (row < num_tokens)
        x = tl.load(x_ptr + row.to(tl.int64) * WIDTH + column, mask=mask)
        tl.store(own + i * WIDTH + column, x, mask=mask)
    _barrier(addresses_ptr, 2 * call, RANK, SIZE, FLAGS_OFFSET)
    for i in range(rows):
        row = program + i * num_programs
        mask = live & (row < num_tokens)
        at = row.to(tl.int64) * WIDTH + column
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            slot = _slot(addresses_ptr, rank, call, TYPE, MAX_PROGRAMS, SLOT_SIZE)
            total += tl.load(
                slot + i * WIDTH + column, mask=mask, other=0.0, cache_modifier=".cg"
            ).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        # Rounded like a separate sum, so the result does not depend on which kernel adds.
        stream = (total.to(TYPE).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + at, stream, mask=mask)
        y = normalize(stream.to(tl.float32), live, weight, bias, eps, WIDTH, CENTERED)
        tl.store(out_ptr + at, y.to(TYPE), mask=mask)
    tl.store(calls_ptr + program, call)


@triton.jit
def _halves(pairs, TYPE: tl.constexpr):
    """Return the numbers at even and at odd positions, in fp32. int64: pairs of fp32."""
    if pairs.dtype == tl.int64:
        even = pairs.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        even = (pairs & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        odd = (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def _pairs(even, odd, TYPE: tl.constexpr):
    """Return pairs of numbers at even and odd positions."""
    low = even.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = odd.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low | high


@triton.jit
def _rounded(x, TYPE: tl.constexpr):
    return x.to(TYPE).to(tl.float32)


@triton.jit
def _pushed_slot(
    addresses_ptr,
    to,
    sender,
    call,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    AT: tl.constexpr,
):
    """Return the address at which a rank receives this row from the sender, in this call."""
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
    PUSHED_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum and norm one row. All tensors are pairs of numbers: HALF of them in a row."""
    row = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    live = lane < HALF
    weight, odd_weight = _halves(tl.load(weight_ptr + lane, mask=live, other=0), TYPE)
    if bias_ptr is not None:
        bias, odd_bias = _halves(tl.load(bias_ptr + lane, mask=live, other=0), TYPE)
    at = row * HALF + lane
    wait(PDL)
    release(PDL)
    call = tl.load(calls_ptr + row) + 1
    signal = call.to(tl.int64) << 32
    own = tl.load(x_ptr + at, mask=live, other=0)
    for step in tl.static_range(1, SIZE):
        slot = _pushed_slot(
            addresses_ptr, (RANK + step) % SIZE, RANK, call, SIZE, ROWS, WORDS, PUSHED_OFFSET
        )
        tl.store(slot + lane, signal | (own.to(tl.int64) & 0xFFFFFFFF), mask=live)
    residual, odd_residual = _halves(tl.load(residual_ptr + at, mask=live, other=0), TYPE)
    total = tl.zeros([PAIRS], tl.float32)
    odd_total = tl.zeros([PAIRS], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            pairs = own
        else:
            slot = _pushed_slot(addresses_ptr, RANK, rank, call, SIZE, ROWS, WORDS, PUSHED_OFFSET)
            words = tl.load(slot + lane, mask=live, other=signal, volatile=True)
            while tl.min((words >> 32).to(tl.int32) - call, 0) < 0:
                words = tl.load(slot + lane, mask=live, other=signal, volatile=True)
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
    if bias_ptr is not None:
        y += bias
        odd_y += odd_bias
    tl.store(out_ptr + at, _pairs(y, odd_y, TYPE), mask=live)
    tl.store(calls_ptr + row, call)
