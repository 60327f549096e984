"""Decode steps: head norms, rotation, cache writes and attention in one kernel or two."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from tests.combinations import pairwise
from tests.kernels.attention import test_rotary
from tests.kernels.attention.test_attention import DTYPES, FP8, NAN, TOLERANCE, Case, make
from toolkit.kernels import reference


@dataclass(frozen=True)
class Fused:
    """Options of `decode_attention` in addition to `Case`, as of `test_rotary.Case`."""

    rotary_size: int = 0
    norm: str = ""
    q_table: bool = False
    clip: float = 0.0
    unstored: tuple[int, ...] = ()
    ordered: bool = False


def check_fused(triton_attention, case: Case, fused: Fused, device: torch.device) -> None:
    """Compare results and caches with those of separate writes and attention."""
    case = replace(case, device=device)
    inputs = make(case)
    torch.manual_seed(case.seed + 1)
    longest = max(context for _, context in case.lens)
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    qkv = torch.randn(len(case.lens), width + 8).to(case.dtype).to(device)[:, :width]
    sizes = (case.heads, case.kv_heads, case.head_size, fused.rotary_size)
    transform = test_rotary.Case(
        *sizes, fused.norm, fused.q_table, fused.clip, tokens=len(case.lens), dtype=case.dtype
    )
    options = test_rotary.head_options(transform, device)
    slots = []
    for request, (_, context) in enumerate(case.lens):
        block = inputs.block_table[request, (context - 1) // case.block_size].item()
        slots.append(block * case.block_size + (context - 1) % case.block_size)
        inputs.k_cache[block, (context - 1) % case.block_size] = NAN
        inputs.v_cache[block, (context - 1) % case.block_size] = NAN
    slot_mapping = torch.tensor(slots, device=device)
    expected_k, expected_v = inputs.k_cache.clone(), inputs.v_cache.clone()
    q = reference.qk_norm_rope_write(
        qkv,
        slot_mapping,
        expected_k,
        expected_v,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        **options,
    )
    expected = reference.paged_attention(
        q,
        expected_k,
        expected_v,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        **case.options,
    )
    for request in fused.unstored:
        slot = slots[request]
        slot_mapping[request] = -1
        for cache in (expected_k, expected_v):
            cache[slot // case.block_size, slot % case.block_size] = NAN
    order = None
    if fused.ordered:
        order = torch.argsort(inputs.seq_lens, descending=True).to(torch.int32)
    actual = triton_attention.decode_attention(
        qkv,
        inputs.k_cache,
        inputs.v_cache,
        slot_mapping,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        order=order,
        num_heads=case.heads,
        max_seq_len=longest,
        **case.options,
        **options,
    )
    tolerance = TOLERANCE[case.dtype] * (1 if case.cached is None else 4)
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert difference < tolerance
    for found, wanted in ((inputs.k_cache, expected_k), (inputs.v_cache, expected_v)):
        found, wanted = found.float(), wanted.float()
        assert (found.isnan() == wanted.isnan()).all()
        close = torch.isclose(found, wanted, rtol=TOLERANCE[case.dtype], atol=1e-5, equal_nan=True)
        # Rounding errors near the middle of two e4m3 numbers can change the rounded result.
        assert (~close).float().mean() < (0.002 if case.cached else 1e-9)


SINGLES = ((1, 9), (1, 1), (1, 70), (1, 16), (1, 17))


@pytest.fixture(autouse=True)
def windows_are_split(triton_attention, monkeypatch):
    """Short windows would not be."""
    monkeypatch.setattr(triton_attention, "SHORT_WINDOW", 0)


def test_keys_of_a_short_window_are_not_split(triton_attention, device, monkeypatch):
    monkeypatch.setattr(triton_attention, "SHORT_WINDOW", 2**14)
    monkeypatch.setattr(triton_attention, "num_splits", lambda *_: pytest.fail("keys are split"))
    case = Case(((1, 90),), heads=4, kv_heads=2, window=40)
    check_fused(triton_attention, case, Fused(32, "rms"), device)


@pytest.mark.on_cpu(
    "(3, 3)-0-0.0-False-1",
    "(3, 3)-1-2.0-True-2",
    "(14, 2)-40-0.0-True-5",
    "(20, 1)-1-0.0-False-2",
    "(16, 1)-1-0.0-True-1",
)
@pytest.mark.parametrize(
    ("heads", "window", "cap", "sinks", "splits"),
    pairwise([(3, 3), (14, 2), (16, 1), (20, 1)], [0, 1, 40], [0.0, 2.0], [False, True], [1, 2, 5]),
    ids=str,
)
def test_groups_windows_caps_sinks_and_splits(
    triton_attention, device, monkeypatch, heads, window, cap, sinks, splits
):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    # With splits, each request runs one program per KV head and split, which are slow here.
    lens = SINGLES if splits == 1 else SINGLES[1:4]
    case = Case(lens, heads=heads[0], kv_heads=heads[1], window=window, cap=cap, sinks=sinks)
    unstored = (0, 3) if splits == 1 else ()
    check_fused(triton_attention, case, Fused(32, "rms", unstored=unstored), device)


@pytest.mark.on_cpu("1")
@pytest.mark.parametrize("splits", [1, 2])
def test_a_chunk_may_begin_with_the_token_itself(triton_attention, device, monkeypatch, splits):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    lens = (1, 24), (1, 25), (1, 26), (1, 70)
    check_fused(triton_attention, Case(lens, chunk=24, block_size=8), Fused(32, "rms"), device)


@pytest.mark.on_cpu(
    "(64, 0)--False-0.0-(torch.float32, None)-1",
    "(64, 0)-rms fp32-True-0.7-(torch.float16, None)-2",
    "(80, 32)-rms last-True-0.7-(torch.float16, torch.float8_e4m3fn)-1",
    "(96, 96)-centered fp32 per-head-False-0.7-(torch.bfloat16, torch.float8_e4m3fn)-1",
    "(128, 64)-centered-True-0.7-(torch.bfloat16, None)-1",
    "(256, 256)-centered last per-head-False-0.0-(torch.bfloat16, None)-1",
)
@pytest.mark.parametrize(
    ("sizes", "norm", "q_table", "clip", "dtypes", "splits"),
    pairwise(
        [(64, 0), (80, 32), (96, 96), (128, 64), (256, 256)],
        ["", *test_rotary.NORMS],
        [False, True],
        [0.0, 0.7],
        [*((dtype, None) for dtype in DTYPES), (torch.float16, FP8), (torch.bfloat16, FP8)],
        [1, 2],
    ),
    ids=str,
)
def test_every_transform_of_every_head_size(
    triton_attention, device, monkeypatch, sizes, norm, q_table, clip, dtypes, splits
):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    case = Case(SINGLES[1:3], head_size=sizes[0], dtype=dtypes[0], cached=dtypes[1])
    check_fused(triton_attention, case, Fused(sizes[1], norm, q_table, clip), device)


@pytest.mark.on_cpu("1-torch.bfloat16-rms values", "2-torch.float32-centered values")
@pytest.mark.parametrize("norm", ["rms values", "centered values"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_normed_values_and_the_largest_heads(
    triton_attention, device, monkeypatch, splits, dtype, norm
):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    case = Case(SINGLES[1:3], head_size=512, dtype=dtype)
    check_fused(triton_attention, case, Fused(512, norm), device)


@pytest.mark.on_cpu("1-torch.bfloat16-rms", "2-torch.float32-rms per-head")
@pytest.mark.parametrize("norm", ["rms", "rms per-head"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_queries_alone_read_the_cache(triton_attention, device, monkeypatch, splits, dtype, norm):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    case = Case(SINGLES, window=12, dtype=dtype, device=device)
    inputs, size = make(case), case.head_size
    q = torch.randn(len(SINGLES), case.heads * size).to(dtype).to(device)
    transform = test_rotary.Case(case.heads, 2, size, 16, norm, tokens=len(q), dtype=dtype)
    options = test_rotary.head_options(transform, device)
    options["norm"] = replace(options["norm"], k_weight=options["norm"].q_weight[:1])
    slots, caches = torch.full((len(q),), -1, device=device), inputs.arguments[1:3]
    counts = {"num_heads": case.heads, "num_kv_heads": 0}
    turned = reference.qk_norm_rope_write(q, slots, *caches, **counts, **options)
    expected = reference.paged_attention(turned, *inputs.arguments[1:], **case.options)
    found = triton_attention.decode_attention(
        *(q, *caches, slots, *inputs.arguments[3:]),
        num_heads=case.heads,
        max_seq_len=70,
        reads=True,
        **case.options,
        **options,
    )
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference < TOLERANCE[dtype]


def test_requests_may_start_in_any_order(triton_attention, device, monkeypatch):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: 1)
    monkeypatch.setattr(triton_attention, "MAX_RESIDENT", 0)
    check_fused(triton_attention, Case(SINGLES), Fused(32, ordered=True), device)


def test_programs_process_the_requests_in_the_order(triton_attention, device, monkeypatch):
    """With an order that names only one request, no other request's key is written."""
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: 1)
    monkeypatch.setattr(triton_attention, "MAX_RESIDENT", 0)
    case = Case(((1, 20), (1, 30), (1, 4)), device=device)
    inputs = make(case)
    inputs.k_cache.fill_(NAN)
    triton_attention.decode_attention(
        torch.randn(3, (case.heads + 2 * case.kv_heads) * case.head_size, device=device),
        inputs.k_cache,
        inputs.v_cache,
        torch.tensor([0, 1, 2], device=device),
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        order=torch.full((3,), 1, dtype=torch.int32, device=device),
        num_heads=case.heads,
        max_seq_len=30,
        scale=1.0,
    )
    written = ~inputs.k_cache[0].isnan().flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [60, 125, 190, 230, 300])
def test_many_requests_of_many_lengths(triton_attention, device, monkeypatch, num_reqs):
    """From about one program per multiprocessor to more than run at once."""
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: 1)
    rng = random.Random(num_reqs)
    lens = tuple((1, rng.randint(1, 300)) for _ in range(num_reqs))
    case = Case(lens, heads=8, head_size=128, dtype=torch.bfloat16)
    check_fused(triton_attention, case, Fused(128, "rms", ordered=True), device)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_requests_write_nothing(triton_attention, device, monkeypatch, splits):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    case = Case(((1, 20), (1, 30)), device=device)
    inputs = make(case)
    qkv = torch.randn(4, (case.heads + 2 * case.kv_heads) * case.head_size, device=device)
    before = inputs.k_cache.clone()
    slots = torch.full((4,), -1, device=device)
    out = triton_attention.decode_attention(
        qkv,
        inputs.k_cache,
        inputs.v_cache,
        slots,
        torch.cat((inputs.query_start_loc, inputs.query_start_loc[-1:].repeat(2))),
        F.pad(inputs.seq_lens, (0, 2)),
        F.pad(inputs.block_table, (0, 0, 0, 2), value=-(10**6)),
        num_heads=case.heads,
        max_seq_len=64,
        scale=1.0,
    )
    assert out[:2].isfinite().all()
    torch.testing.assert_close(inputs.k_cache, before, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="heads"):
        triton_attention.decode_attention(
            qkv[:, :-8],
            inputs.k_cache,
            inputs.v_cache,
            *[inputs.seq_lens] * 4,
            num_heads=4,
            max_seq_len=1,
            scale=1.0,
        )


SHORT = {
    2: ((2, 9), (1, 70), (0, 5), (2, 2), (2, 33), (1, 1)),
    4: ((3, 9), (1, 70), (0, 5), (4, 4), (2, 33), (4, 90)),
    7: ((7, 40), (0, 3), (1, 1), (6, 21)),
    16: ((16, 17), (2, 50), (9, 70), (0, 1)),
}
"""Steps by most queries: (queries, context including them) of each request. 0: padding."""


def check_drafts(
    triton_attention, case: Case, most: int, device: torch.device, *, indirect: bool = False
) -> None:
    """Compare attention with the reference. Tokens of no request keep their values."""
    case = replace(case, device=device)
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    num_tokens = len(case.lens) * most
    q, *arguments = inputs.arguments
    q = F.pad(q, (0, 0, 0, 0, 0, num_tokens - len(q)), value=NAN)
    rows = None
    if indirect:
        rows = torch.randperm(len(case.lens), device=device).to(torch.int32)
        arguments[-1] = torch.zeros_like(inputs.block_table)
        arguments[-1][rows.long()] = inputs.block_table
    out = torch.full_like(q, 7.0)
    triton_attention.paged_attention(
        q,
        *arguments,
        rows=rows,
        order=torch.argsort(inputs.seq_lens, descending=True).to(torch.int32),
        max_query_len=most,
        max_seq_len=case.bounds["max_seq_len"],
        is_decode=True,
        out=out,
        **case.options,
    )
    found = out[: len(expected)]
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference < TOLERANCE[case.dtype] * (4 if case.cached else 1)
    assert (out[len(expected) :] == 7.0).all()


@pytest.fixture
def no_prefill(triton_attention, monkeypatch):
    monkeypatch.setattr(triton_attention, "prefill", lambda *_, **__: pytest.fail("not decode"))


@pytest.mark.on_cpu(
    "7-(4, 4)-(80, 5)-0-0.0-True-(torch.bfloat16, None)-5-True-True",
    "2-(8, 1)-(128, 16)-3-2.0-True-(torch.float16, None)-1-True-True",
    "2-(4, 4)-(80, 5)-40-0.0-False-(torch.float16, torch.float8_e4m3fn)-2-False-False",
    "4-(14, 2)-(128, 16)-0-0.0-False-(torch.bfloat16, None)-1-False-False",
    "2-(5, 1)-(32, 16)-1-0.0-False-(torch.float16, None)-1-False-False",
    "16-(5, 1)-(32, 16)-0-0.0-False-(torch.float16, None)-1-False-False",
)
@pytest.mark.parametrize(
    ("most", "heads", "sizes", "window", "cap", "sinks", "dtypes", "splits", "indirect", "ordered"),
    pairwise(
        [2, 4, 7, 16],
        [(4, 4), (14, 2), (5, 1), (8, 1)],
        [(32, 16), (80, 5), (128, 16)],
        [0, 1, 3, 40],
        [0.0, 2.0],
        [False, True],
        [(torch.float16, None), (torch.bfloat16, None), (torch.float16, FP8)],
        [1, 2, 5],
        [False, True],
        [False, True],
    ),
    ids=str,
)
def test_a_token_and_its_drafts(
    triton_attention,
    device,
    monkeypatch,
    no_prefill,
    most,
    heads,
    sizes,
    window,
    cap,
    sinks,
    dtypes,
    splits,
    indirect,
    ordered,
):
    """Each query sees the keys up to its own."""
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    monkeypatch.setattr(triton_attention, "MAX_RESIDENT", 0 if ordered else 1e9)
    case = Case(SHORT[most], *heads, *sizes, *dtypes, window, cap=cap, sinks=sinks)
    check_drafts(triton_attention, case, most, device, indirect=indirect)


@pytest.mark.on_cpu("2-3")
@pytest.mark.parametrize(("most", "splits"), [(2, 3), (4, 1), (7, 2)])
def test_drafts_of_large_heads_in_fp32(
    triton_attention, device, monkeypatch, no_prefill, most, splits
):
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    case = Case(SHORT[most], heads=4, kv_heads=1, head_size=256, window=20, block_size=64)
    check_drafts(triton_attention, case, most, device)


def test_requests_with_drafts_start_in_the_order(triton_attention, device, monkeypatch):
    """With an order that names only one request, no other has a result."""
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: 1)
    monkeypatch.setattr(triton_attention, "MAX_RESIDENT", 0)
    case = Case(((2, 20), (3, 30), (1, 4)), device=device)
    inputs = make(case)
    out = torch.full(inputs.q.shape, NAN, device=device)
    triton_attention.paged_attention(
        *inputs.arguments,
        order=torch.full((3,), 1, dtype=torch.int32, device=device),
        **case.bounds,
        **case.options,
        is_decode=True,
        out=out,
    )
    assert (~out.isnan().flatten(1).any(1)).nonzero().flatten().tolist() == [2, 3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize(("most", "heads", "head_size"), [(4, 8, 128), (8, 8, 256), (16, 16, 128)])
@pytest.mark.parametrize(("dtype", "cached"), [(torch.bfloat16, None), (torch.bfloat16, FP8)])
@pytest.mark.parametrize("num_reqs", [1, 8, 64])
def test_many_requests_with_drafts(
    triton_attention, device, no_prefill, most, heads, head_size, dtype, cached, num_reqs
):
    """Tiles of 16, 32 and 128 rows, with as many splits as the GPU has room for."""
    rng = random.Random(num_reqs)
    lens = []
    for _ in range(num_reqs):
        queries = rng.randint(1, most)
        lens.append((queries, queries + rng.randint(0, 2000)))
    case = Case(tuple(lens), heads, 2, head_size, dtype=dtype, cached=cached)
    check_drafts(triton_attention, case, most, device)


@pytest.mark.on_cpu("16-64-dtype0-16", "16-128-dtype1-16", "8-256-dtype3-8")
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype", "most"),
    [
        (16, 64, torch.float16, 16),
        (16, 128, torch.float16, 16),
        (16, 256, torch.float16, 8),
        (8, 256, torch.float32, 8),
    ],
)
def test_many_rows_are_left_to_the_kernel_of_prompts(
    triton_attention, device, monkeypatch, heads, head_size, dtype, most
):
    case = Case(((1, 30),), heads, 2, head_size, dtype=dtype, device=device)
    inputs, calls = make(case), []
    monkeypatch.setattr(triton_attention, "decode", lambda *_, **__: calls.append("decode"))
    monkeypatch.setattr(triton_attention, "prefill", lambda *_, **__: calls.append("prefill"))
    for queries in (most, most + 1):
        triton_attention.paged_attention(
            *inputs.arguments, **case.options, max_query_len=queries, max_seq_len=30, is_decode=True
        )
    assert calls == ["decode", "prefill"]


@pytest.mark.on_cpu("1-None-False", "2-torch.float8_e4m3fn-True")
@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize(("splits", "cached"), [(1, None), (2, FP8)], ids=str)
def test_one_query_has_its_own_kernels(
    triton_attention, device, monkeypatch, is_decode, splits, cached
):
    """Its tile is the smallest, and each program merges one head of one request."""
    launches = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *_, **options: launches.append((grid, options))

    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    for name in ("decode_kernel", "merge_kernel"):
        monkeypatch.setattr(triton_attention, name, Recorded())
    shape = {"heads": 8, "head_size": 128, "dtype": torch.bfloat16, "cached": cached}
    case = Case(((1, 40), (1, 70)), **shape, device=device)
    triton_attention.paged_attention(
        *make(case).arguments, **case.bounds, **case.options, is_decode=is_decode
    )
    (grid, options), *merges = launches
    assert grid == (2, 2, splits)
    names = "QUERIES", "ROWS", "KEYS", "num_warps", "num_stages"
    assert [options[name] for name in names] == ([1, 8, 64, 2, 3] if cached else [1, 16, 32, 2, 3])
    assert [(grid, options["QUERIES"]) for grid, options in merges] == [((8, 2, 1), 1)] * (
        splits - 1
    )
