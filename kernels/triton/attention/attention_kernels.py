"""Kernels of `attention`: a loop over tiles of keys, and the kernels around it."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from ..pdl import fetch, release, wait
from ..products.fp8 import to_fp8
from .rotary import clipped

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _table_of(request, table_ptr, row_ptr, table_stride, INDIRECT: tl.constexpr):
    """Return the address of a request's block numbers."""
    row = request
    if INDIRECT:
        row = tl.load(row_ptr + request).to(tl.int64)
    return table_ptr + row * table_stride


@triton.jit
def _before(position, end):
    """Return positions, or the last one before `end`. 0 if there is none."""
    return tl.maximum(tl.minimum(position, end - 1), 0)


@triton.jit
def _load_blocks(table_ptr, position, end, BLOCK_SIZE: tl.constexpr, REPEATED: tl.constexpr):
    """Load the block numbers of positions before `end`. Unsigned division can become a shift."""
    if REPEATED:
        block = tl.load(table_ptr + _before(position, end).to(tl.uint32) // BLOCK_SIZE)
    else:
        at = table_ptr + position.to(tl.uint32) // BLOCK_SIZE
        block = tl.load(at, mask=position < end, other=0)
    return block


@triton.jit
def _fetch_rows(
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    kv_stride_block,
    kv_stride_slot,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Prefetch keys and values of up to KEYS positions from `begin`, written by earlier steps."""
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_SIZE, LINE))
    position = begin + tl.arange(0, KEYS)
    block = _load_blocks(table_ptr, position, end, BLOCK_SIZE, False)
    slot = position.to(tl.uint32) % BLOCK_SIZE
    line = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_SIZE - 1)
    rows = (block.to(tl.int64) * kv_stride_block + slot * kv_stride_slot)[:, None] + line[None, :]
    fetch(k_ptr + rows)
    fetch(v_ptr + rows)


@triton.jit
def _load_rows(pointers, live, in_head, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile `[keys, head]` with only the masks that it needs."""
    if MASKED and PADDED:
        rows = tl.load(pointers, mask=live[:, None] & in_head[None, :], other=0.0)
    elif MASKED:
        rows = tl.load(pointers, mask=live[:, None], other=0.0)
    elif PADDED:
        rows = tl.load(pointers, mask=in_head[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def _like_cache(q, k_ptr):
    """Convert queries to the type of the products.

    A GPU converts two e4m3 numbers to fp16 by one instruction, and to bf16 by four."""
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(
            tl.float16
        )
    return q


@triton.jit
def _widened(v, DTYPE: tl.constexpr):
    """Convert values to the type of the products.

    A dot's second operand is read across rows. The compiler would read FP8 so, byte by byte, and
    then convert it; fp16 is read by 8x8 tiles. So this converts first: the compiler moves nothing
    past assembly that is not pure."""
    if v.dtype.is_fp8e4nv() and DTYPE.is_fp16() and not INTERPRETED:
        v = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [v.to(tl.uint8, bitcast=True)],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return v.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """Return a @ b + acc in fp32. The interpreter multiplies bits of bf16, so they are widened."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _attend(
    q,
    acc,
    row_max,
    row_sum,
    begin,
    end,
    first_key,
    last_key,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_stride_block,
    kv_stride_slot,
    inner_scale,
    outer_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    SLIDING: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys at positions [begin, end) into a running softmax.

    Row i sees keys in [first_key[i], last_key[i]], which ends before `end`. Without MASKED every
    row sees every key, and `end - begin` is a multiple of KEYS. No key outside [begin, end) is
    read. In place of those past the last, FP8 repeats the last one, without weight: masks take more
    instructions, which bound it. In 16 bits, masks are faster for few requests.

    Tensor cores take 16 rows of a product's first operand at a time, and 8 of its second, as which
    they take fewer than 16 queries: all is transposed then."""
    FEW: tl.constexpr = q.shape[0] < 16
    KEY_AXIS: tl.constexpr = 0 if FEW else 1
    REPEATED: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    MASKS: tl.constexpr = MASKED and not REPEATED
    dim = tl.arange(0, HEAD_PAD)
    in_head = dim < HEAD_SIZE
    lane = tl.arange(0, KEYS)
    if FEW:
        q = tl.trans(q)
        acc = tl.trans(acc)
    # Of numbers that fit 32 bits, one instruction makes an address.
    block_stride = kv_stride_block.to(tl.uint32).to(tl.uint64)
    slot_stride = kv_stride_slot.to(tl.uint32)
    # Block numbers are loaded a step ahead: only then can the compiler load keys and values ahead.
    block = _load_blocks(table_ptr, begin + lane, end, BLOCK_SIZE, REPEATED)
    for tile in range(begin, end, KEYS):
        position = tile + lane
        live = position < end
        block_ahead = _load_blocks(table_ptr, position + KEYS, end, BLOCK_SIZE, REPEATED)
        slot = (_before(position, end) if REPEATED else position).to(tl.uint32) % BLOCK_SIZE
        in_block = (slot * slot_stride)[:, None] + dim.to(tl.uint32)[None, :]
        rows = (block.to(tl.uint32).to(tl.uint64) * block_stride)[:, None] + in_block

        k = _load_rows(k_ptr + rows, live, in_head, MASKS, HEAD_PAD != HEAD_SIZE).to(q.dtype)
        if FEW:
            x = dot(k, q, None)
        else:
            x = dot(q, tl.trans(k), None)
        if CAPPED:
            x = 2 * tl.sigmoid(x * inner_scale) - 1
        if MASKED:
            key = tl.expand_dims(position, 1 - KEY_AXIS)
            visible = key <= tl.expand_dims(last_key, KEY_AXIS)
            if SLIDING:
                visible = visible & (key >= tl.expand_dims(first_key, KEY_AXIS))
            x = tl.where(visible, x, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(x, KEY_AXIS) * outer_scale)
        weight = tl.exp2(x * outer_scale - tl.expand_dims(new_max, KEY_AXIS))
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weight, KEY_AXIS)
        row_max = new_max

        v = _load_rows(v_ptr + rows, live, in_head, MASKS, HEAD_PAD != HEAD_SIZE)
        v = _widened(v, q.dtype)
        acc *= tl.expand_dims(decay, KEY_AXIS)
        if FEW:
            acc = dot(tl.trans(v), weight.to(q.dtype), acc)
        else:
            acc = dot(weight.to(q.dtype), v, acc)
        block = block_ahead
    if FEW:
        acc = tl.trans(acc)
    return acc, row_max, row_sum


@triton.jit
def _first_key(position, window, CHUNKED: tl.constexpr):
    """Return the first key that queries see: of their chunk of `window` tokens, or of a window."""
    if CHUNKED:
        first = position // window * window
    else:
        first = position - (window - 1)
    return first


@triton.jit
def _start(sinks_ptr, head, live):
    """Return (maximum, sum) of a running softmax in base 2: empty, or with each head's sink."""
    row_max = tl.full(head.shape, -1e30, tl.float32)
    row_sum = tl.zeros(head.shape, tl.float32)
    if sinks_ptr is not None:
        row_max = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        row_sum += 1.0
    return row_max, row_sum


@triton.jit
def _load_pairs(
    pointers, in_row, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, HALF: tl.constexpr
):
    """Load heads `[rows, head]`, and the same with the numbers of rotated pairs swapped.

    The numbers of a pair are HALF apart."""
    dim = tl.arange(0, HEAD_PAD)
    live = in_row & (dim < HEAD_SIZE)[None, :]
    x = tl.load(pointers + dim[None, :], mask=live, other=0.0)
    other = x
    if HALF:
        other = tl.load(pointers + _other(dim, HALF)[None, :], mask=live, other=0.0)
    return x, other


@triton.jit
def _turned(
    x,
    other,
    weight,
    other_weight,
    cos,
    sin,
    eps,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    LAST: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Clip, norm and rotate heads `[rows, head]` in fp32."""
    x = clipped(x.to(tl.float32), CLIP)
    other = clipped(other.to(tl.float32), CLIP)
    for is_last in tl.static_range(2):
        if NORMED and is_last == LAST:
            if CENTERED:
                mean = (tl.sum(x, 1) / HEAD_SIZE)[:, None]
                x = tl.where((tl.arange(0, HEAD_PAD) < HEAD_SIZE)[None, :], x - mean, 0.0)
                other -= mean
            scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_SIZE + eps)[:, None]
            x *= scale * weight.to(tl.float32)
            other *= scale * other_weight.to(tl.float32)
        if HALF and not is_last:
            x = x * cos[None, :] + other * sin[None, :]
    return x


@triton.jit
def _other(dim, HALF: tl.constexpr):
    """Return the dimension that each is rotated with, or itself."""
    return tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))


@triton.jit
def _angles(row_ptr, live, HEAD_PAD: tl.constexpr, HALF: tl.constexpr):
    """Load the factors of a head's numbers and of their partners: cosines and signed sines."""
    dim = tl.arange(0, HEAD_PAD)
    is_second = dim >= HALF
    pair = tl.where(is_second, dim - HALF, dim)
    rotates = live & (dim < 2 * HALF)
    cos = tl.load(row_ptr + pair, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row_ptr + HALF + pair, mask=rotates, other=0.0).to(tl.float32)
    return cos, tl.where(is_second, sin, -sin)


@triton.jit
def _cached(x, k_ptr):
    """Convert keys or values to the cache's type."""
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        x = to_fp8(x)
    else:
        x = x.to(k_ptr.dtype.element_ty)
    return x


@triton.jit(do_not_specialize=["window", "splits"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_ptr,
    seq_len_ptr,
    table_ptr,
    row_ptr,
    order_ptr,
    out_ptr,
    part_ptr,
    log_sum_ptr,
    slot_ptr,
    sinks_ptr,
    cos_sin_ptr,
    q_cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_stride_token,
    q_stride_head,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    out_stride_token,
    out_stride_head,
    inner_scale,
    outer_scale,
    window,
    splits,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    INDIRECT: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SLIDING: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    OWN: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    LAST: tl.constexpr,
    VALUES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CLIP: tl.constexpr,
    READS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Attend from the heads of a (KV head, request) to the keys of one split.

    A request has 1 to QUERIES queries, its last tokens; others are skipped.
    If ORDERED, requests start in the order of `order_ptr`. If OWN, q is the projected qkv: the
    token's own key and value are not in the cache yet, and come last. That excludes splits, in
    which every program would repeat it. If READS, too, q has queries alone, and the cache has the
    token's key and value. `sinks_ptr` and `q_cos_sin_ptr` may be None."""
    tl.static_assert(not (OWN and ((SPLIT and not READS) or QUERIES > 1)))
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    if ORDERED:
        request = tl.load(order_ptr + request).to(tl.int64)
    split = tl.program_id(2)
    token = tl.load(query_start_ptr + request).to(tl.int64)
    num_queries = (tl.load(query_start_ptr + request + 1) - token).to(tl.int32)
    single = (num_queries > 0) & (num_queries <= QUERIES)
    seq_len = tl.load(seq_len_ptr + request)
    table_ptr = _table_of(request, table_ptr, row_ptr, table_stride, INDIRECT)
    k_ptr += kv_head.to(tl.int64) * kv_stride_head
    v_ptr += kv_head.to(tl.int64) * kv_stride_head

    begin = tl.zeros_like(seq_len)
    if SLIDING:
        first_query = seq_len - 1
        if QUERIES > 1:
            first_query -= num_queries - 1
        begin = tl.maximum(_first_key(first_query, window, CHUNKED), 0)
    end = seq_len
    if OWN and not READS:
        end -= 1
        slot = tl.load(slot_ptr + token, mask=single, other=-1)
    if OWN:
        one = tl.full([1, 1], True, tl.int1)
        no_rows = tl.zeros([1, 1], tl.int32)
        cos, sin, q_weight, q_other_weight, k_weight, k_other_weight = 1.0, 0.0, 1.0, 1.0, 1.0, 1.0
        if HALF:
            cos, sin = _angles(cos_sin_ptr + token * (2 * HALF), single, HEAD_PAD, HALF)
        q_cos, q_sin = cos, sin
        if q_cos_sin_ptr is not None:
            q_cos, q_sin = _angles(q_cos_sin_ptr + token * (2 * HALF), single, HEAD_PAD, HALF)
        if NORMED:
            q_weights, in_weights = q_weight_ptr + no_rows, one
            if PER_HEAD:
                in_weights = (tl.arange(0, ROWS) < GROUP)[:, None]
                q_weights = (
                    q_weight_ptr + ((kv_head * GROUP + tl.arange(0, ROWS)) * HEAD_SIZE)[:, None]
                )
                k_weight_ptr += kv_head * HEAD_SIZE
            q_weight, q_other_weight = _load_pairs(q_weights, in_weights, HEAD_SIZE, HEAD_PAD, HALF)
            k_weight, k_other_weight = _load_pairs(
                k_weight_ptr + no_rows, one, HEAD_SIZE, HEAD_PAD, HALF
            )
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
        begin += split * share
        end = tl.minimum(end, begin + share)
    if OWN and PDL:
        _fetch_rows(
            k_ptr,
            v_ptr,
            table_ptr,
            begin,
            end,
            kv_stride_block,
            kv_stride_slot,
            BLOCK_SIZE,
            HEAD_SIZE,
            KEYS,
        )
    wait(PDL)
    release(PDL)
    if not single:
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_PAD)
    head = kv_head * GROUP + row
    is_head = row < GROUP
    if QUERIES > 1:  # rows of a query follow each other
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_head = query < num_queries
        token += tl.minimum(query, num_queries - 1)[:, None]
    in_group = is_head[:, None]
    in_head = dim < HEAD_SIZE
    stored = in_group & in_head[None, :]
    q_rows = q_ptr + token * q_stride_token + (head * q_stride_head)[:, None]
    if OWN and not READS:
        k_row = (
            q_ptr
            + token * q_stride_token
            + (tl.num_programs(0) * GROUP + kv_head) * HEAD_SIZE
            + no_rows
        )
        v_row = k_row + tl.num_programs(0) * HEAD_SIZE
        own_k, k_other = _load_pairs(k_row, one, HEAD_SIZE, HEAD_PAD, HALF)
        own_v = tl.load(v_row + dim[None, :], mask=in_head[None, :], other=0.0)
    if OWN:
        q, other = _load_pairs(q_rows, in_group, HEAD_SIZE, HEAD_PAD, HALF)
        q = _turned(
            q,
            other,
            q_weight,
            q_other_weight,
            q_cos,
            q_sin,
            eps,
            HEAD_SIZE,
            HEAD_PAD,
            HALF,
            NORMED,
            CENTERED,
            LAST,
            CLIP,
        )
        q = q.to(q_ptr.dtype.element_ty)
    else:
        q = tl.load(q_rows + dim[None, :], mask=stored, other=0.0)
    q = _like_cache(q, k_ptr)

    row_max, row_sum = _start(sinks_ptr, head, is_head)
    last_key = tl.zeros([ROWS], tl.int32) + (end - 1)
    first_key = row
    if QUERIES > 1:
        last_key = seq_len - num_queries + query
        first_key = _first_key(last_key, window, CHUNKED)
    if SPLIT and sinks_ptr is not None:
        row_sum = tl.where(split == 0, row_sum, 0.0)
    acc, row_max, row_sum = _attend(
        q,
        tl.zeros([ROWS, HEAD_PAD], tl.float32),
        row_max,
        row_sum,
        begin,
        end,
        first_key,
        last_key,
        k_ptr,
        v_ptr,
        table_ptr,
        kv_stride_block,
        kv_stride_slot,
        inner_scale,
        outer_scale,
        BLOCK_SIZE,
        HEAD_SIZE,
        HEAD_PAD,
        KEYS,
        CAPPED,
        SLIDING and QUERIES > 1,
        True,
    )
    if OWN and not READS:
        own_k = _turned(
            own_k,
            k_other,
            k_weight,
            k_other_weight,
            cos,
            sin,
            eps,
            HEAD_SIZE,
            HEAD_PAD,
            HALF,
            NORMED,
            CENTERED,
            LAST,
            CLIP,
        )
        own_v = clipped(own_v.to(tl.float32), CLIP)
        if VALUES:
            if CENTERED:
                own_v = tl.where(in_head[None, :], own_v - tl.sum(own_v, 1) / HEAD_SIZE, 0.0)
            own_v *= tl.rsqrt(tl.sum(own_v * own_v, 1) / HEAD_SIZE + eps)[:, None]
        own_k, own_v = _cached(own_k, k_ptr), _cached(own_v, k_ptr)
        kept = in_head[None, :] & (slot >= 0)
        slot = tl.maximum(slot, 0)
        place = (
            slot // BLOCK_SIZE * kv_stride_block + slot % BLOCK_SIZE * kv_stride_slot + dim[None, :]
        )
        tl.store(k_ptr + place, own_k, mask=kept)
        tl.store(v_ptr + place, own_v, mask=kept)
        x = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1)
        if CAPPED:
            x = 2 * tl.sigmoid(x * inner_scale) - 1
        new_max = tl.maximum(row_max, x * outer_scale)
        weight = tl.exp2(x * outer_scale - new_max)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + weight
        row_max = new_max
        acc = acc * decay[:, None] + weight[:, None] * own_v.to(tl.float32)
    result = acc / tl.maximum(row_sum, 1e-30)[:, None]
    if SPLIT:
        part = request * QUERIES
        if QUERIES > 1:
            part += query
        part = (part * tl.num_programs(0) * GROUP + head) * splits + split
        tl.store(part_ptr + (part * HEAD_SIZE)[:, None] + dim[None, :], result, mask=stored)
        log_sum = row_max + tl.log2(tl.maximum(row_sum, 1e-30))
        tl.store(log_sum_ptr + part, tl.where(row_sum > 0, log_sum, -float("inf")), mask=is_head)
    else:
        out_rows = (
            out_ptr + token * out_stride_token + (head * out_stride_head)[:, None] + dim[None, :]
        )
        tl.store(out_rows, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_ptr,
    log_sum_ptr,
    out_ptr,
    query_start_ptr,
    splits,
    out_stride_token,
    out_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    PDL: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Merge the splits of a (head, request, query), weighted by the softmax of their log-sums."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    query = tl.program_id(2) if QUERIES > 1 else 0
    token = tl.load(query_start_ptr + request).to(tl.int64)
    num_queries = (tl.load(query_start_ptr + request + 1) - token).to(tl.int32)
    wait(PDL)
    release(PDL)
    if (query >= num_queries) | (num_queries > QUERIES):
        return
    token += query
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, HEAD_PAD)
    part = ((request * QUERIES + query) * tl.num_programs(0) + head) * splits + split
    log_sum = tl.load(log_sum_ptr + part, mask=split < splits, other=-float("inf"))
    weight = tl.exp2(log_sum - tl.maximum(tl.max(log_sum, 0), -1e30))
    weight /= tl.maximum(tl.sum(weight, 0), 1e-30)
    used = (log_sum > -float("inf"))[:, None] & (dim < HEAD_SIZE)[None, :]
    parts = tl.load(part_ptr + (part * HEAD_SIZE)[:, None] + dim[None, :], mask=used, other=0.0)
    result = tl.sum(parts * weight[:, None], 0)
    out_row = out_ptr + token * out_stride_token + head * out_stride_head + dim
    tl.store(out_row, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_SIZE)


@triton.jit
def _request_of_tile(query_start_ptr, tile, num_reqs, TOKENS: tl.constexpr):
    """Return the last request r whose first tile, start[r] // TOKENS + r, is not after `tile`."""
    not_after = 0
    for base in range(0, num_reqs, 256):
        request = base + tl.arange(0, 256)
        start = tl.load(query_start_ptr + request, mask=request < num_reqs, other=0)
        first_tile = start // TOKENS + request
        not_after += tl.sum(((request < num_reqs) & (first_tile <= tile)).to(tl.int32), 0)
    return not_after - 1


@triton.jit(do_not_specialize=["window", "num_reqs", "singles"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_ptr,
    seq_len_ptr,
    table_ptr,
    row_ptr,
    sinks_ptr,
    last_key_ptr,
    out_ptr,
    q_stride_token,
    q_stride_head,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    out_stride_token,
    out_stride_head,
    inner_scale,
    outer_scale,
    window,
    num_reqs,
    singles,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    INDIRECT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SLIDING: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend from a (tile of TOKENS queries, KV head).

    A prompt's last tiles have the most keys and start first. `sinks_ptr` and `last_key_ptr` may be
    None."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    request = _request_of_tile(query_start_ptr, tile, num_reqs, TOKENS)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    context = tl.load(seq_len_ptr + request) - query_len
    first_query = (tile - query_start // TOKENS - request) * TOKENS
    if (first_query >= query_len) | ((query_len == 1) & (singles == 0)):
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_PAD)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    stored = ((query < query_len) & (row < TOKENS * GROUP))[:, None] & (dim < HEAD_SIZE)[None, :]
    token = (query_start + query).to(tl.int64)
    q_rows = (token * q_stride_token + head * q_stride_head)[:, None] + dim[None, :]
    q = _like_cache(tl.load(q_ptr + q_rows, mask=stored, other=0.0), k_ptr)

    last_key = context + query
    first_key = _first_key(last_key, window, CHUNKED)
    end = context + tl.minimum(first_query + TOKENS, query_len)
    if last_key_ptr is not None:
        is_query = (query < query_len) & (row < TOKENS * GROUP)
        last_key = tl.load(last_key_ptr + token, mask=is_query, other=0)
        end = tl.max(last_key, 0) + 1
    k_ptr += kv_head.to(tl.int64) * kv_stride_head
    v_ptr += kv_head.to(tl.int64) * kv_stride_head
    table_ptr = _table_of(request.to(tl.int64), table_ptr, row_ptr, table_stride, INDIRECT)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    row_max, row_sum = _start(sinks_ptr, head, row < TOKENS * GROUP)
    if SLIDING:
        begin = tl.maximum(_first_key(context + first_query, window, CHUNKED), 0)
    else:
        # Every row sees these keys, so they need no masks.
        begin = (context + first_query + 1) // KEYS * KEYS
        acc, row_max, row_sum = _attend(
            q,
            acc,
            row_max,
            row_sum,
            0,
            begin,
            first_key,
            last_key,
            k_ptr,
            v_ptr,
            table_ptr,
            kv_stride_block,
            kv_stride_slot,
            inner_scale,
            outer_scale,
            BLOCK_SIZE,
            HEAD_SIZE,
            HEAD_PAD,
            KEYS,
            CAPPED,
            False,
            False,
        )
    acc, row_max, row_sum = _attend(
        q,
        acc,
        row_max,
        row_sum,
        begin,
        end,
        first_key,
        last_key,
        k_ptr,
        v_ptr,
        table_ptr,
        kv_stride_block,
        kv_stride_slot,
        inner_scale,
        outer_scale,
        BLOCK_SIZE,
        HEAD_SIZE,
        HEAD_PAD,
        KEYS,
        CAPPED,
        SLIDING,
        True,
    )
    result = acc / tl.maximum(row_sum, 1e-30)[:, None]
    out_rows = (token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
    tl.store(out_ptr + out_rows, result.to(out_ptr.dtype.element_ty), mask=stored)
