"""Prefill attention for Hopper GPUs, compared with the reference. Most tests need such a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.combinations import pairwise
from tests.kernels.attention.test_attention import FP8, NAN, Case, assert_close, make
from toolkit.kernels import reference

gpu = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an NVIDIA GPU of the Hopper generation",
)
WIDE = Case(
    ((1, 20), (5, 37), (130, 130), (1, 1), (65, 200)),
    heads=8,
    kv_heads=2,
    head_size=128,
    dtype=torch.bfloat16,
)
CACHED = [None, FP8]


@pytest.fixture
def calls(triton_attention, monkeypatch):
    """Return the `singles` argument of each call of the Hopper kernel."""
    calls = []
    original = triton_attention._prefill_on_hopper

    def called(batch, logits, singles):
        calls.append(singles)
        original(batch, logits, singles)

    monkeypatch.setattr(triton_attention, "_prefill_on_hopper", called)
    return calls


def assert_rows_close(actual: Tensor, expected: Tensor) -> None:
    """Compare each head of each token, so that one wrong row at the edge of a tile fails."""
    difference = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert (
        difference.max() < {torch.float16: 4e-3, torch.bfloat16: 2e-2}[actual.dtype]
    )  # NaN fails too


def check(triton_attention, case: Case, times: int = 1) -> None:
    case = replace(case, device=torch.device("cuda", 0))
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    for _ in range(times):
        out = torch.full(inputs.q.shape, NAN, dtype=case.dtype, device=case.device)
        triton_attention.paged_attention(*inputs.arguments, **case.bounds, **case.options, out=out)
        assert_rows_close(out, expected)


@pytest.mark.parametrize(
    ("changes", "suits"),
    [
        ({}, True),
        ({"dtype": torch.float16, "block_size": 256, "heads": 71, "kv_heads": 1}, True),
        ({"dtype": torch.float32}, False),
        ({"cached": FP8}, True),
        ({"cached": FP8, "dtype": torch.float32}, False),
        ({"window": 5}, False),
        ({"cap": 5.0}, False),
        ({"head_size": 64}, False),
        ({"head_size": 256}, False),
        ({"block_size": 7}, False),
        ({"block_size": 4}, False),
        ({"heads": 130, "kv_heads": 1}, False),
    ],
    ids=str,
)
def test_supported_shapes_and_dtypes(triton_attention, monkeypatch, changes, suits):
    monkeypatch.setattr(triton_attention, "is_hopper", lambda device: True)
    case = replace(WIDE, lens=((3, 5),), **changes)
    inputs = make(case)
    batch = triton_attention.Batch(*inputs.arguments, torch.empty_like(inputs.q))
    logits = triton_attention.Logits(1.0, case.window, case.cap)
    assert triton_attention._suits_hopper(batch, logits) == suits


def suits(triton_attention, q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Tensor) -> bool:
    batch = triton_attention.Batch(q, k_cache, v_cache, *rest, torch.empty_like(q))
    answer: bool = triton_attention._suits_hopper(batch, triton_attention.Logits(1.0, 0, 0.0))
    return answer


def padded(x: Tensor, dim: int, by: int) -> Tensor:
    """Return x with `by` unused numbers after its slices of `dim`."""
    shape = list(x.shape)
    shape[dim] += by
    return x.new_zeros(shape).narrow(dim, 0, x.shape[dim]).copy_(x)


def test_supported_layouts(triton_attention, monkeypatch):
    """Copies need evenly spaced slots, and addresses and strides divisible by 16 bytes."""
    monkeypatch.setattr(triton_attention, "is_hopper", lambda device: True)
    q, k, v, *rest = make(replace(WIDE, lens=((3, 5),))).arguments

    def both(change):
        return change(k), change(v)

    assert suits(triton_attention, q, k, v, *rest)
    assert suits(triton_attention, q, *both(lambda x: padded(x, 2, 1)), *rest)
    assert not suits(
        triton_attention, q, *both(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), *rest
    )
    assert not suits(triton_attention, q, *both(lambda x: padded(x, 3, 16)), *rest)
    flat = [x.flatten(2) for x in (k, v)]
    assert not suits(
        triton_attention, q, *(padded(x, 2, 8).unflatten(2, k.shape[2:]) for x in flat), *rest
    )
    blocks = [padded(x.flatten(1), 1, 16).unflatten(1, k.shape[1:]) for x in (k, v)]
    assert not suits(triton_attention, q, *blocks, *rest)
    assert not suits(
        triton_attention, padded(q.flatten(1), 1, 8).unflatten(1, q.shape[1:]), k, v, *rest
    )
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert not suits(triton_attention, odd, k, v, *rest)


@pytest.mark.parametrize(
    ("version", "generation", "supported"),
    [
        ("3.6.0", 9, True),
        ("3.7.1", 9, True),
        ("3.5.1", 9, False),
        ("3.8.0", 9, False),
        ("3.6.0", 10, False),
    ],
)
def test_supported_gpus_and_triton_versions(
    triton_attention, monkeypatch, version, generation, supported
):
    from toolkit.kernels.triton import hopper

    monkeypatch.setattr(hopper.triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    assert hopper.is_hopper.__wrapped__(torch.device("cuda", 0)) == supported
    assert not hopper.is_hopper.__wrapped__(torch.device("cpu"))


@gpu
@needs_hopper
@pytest.mark.parametrize(
    ("block_size", "dtype", "cached", "heads"),
    pairwise(
        [8, 16, 32, 64, 128, 256],
        [torch.bfloat16, torch.float16],
        CACHED,
        [(3, 3), (8, 2), (16, 2), (14, 2), (8, 1), (71, 1), (128, 1)],
    ),
)
def test_every_supported_shape(triton_attention, calls, block_size, dtype, cached, heads):
    case = replace(
        WIDE,
        block_size=block_size,
        dtype=dtype,
        cached=cached,
        heads=heads[0],
        kv_heads=heads[1],
    )
    check(triton_attention, case, times=3)
    assert calls == [True] * 3


@gpu
@needs_hopper
@pytest.mark.parametrize("query_len", [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("before", [0, 1, 63, 64, 65, 500])
@pytest.mark.parametrize("cached", CACHED)
def test_prompts_around_tile_sizes(triton_attention, calls, query_len, before, cached):
    lens = (query_len, before + query_len), (2, 2)
    check(triton_attention, replace(WIDE, lens=lens, cached=cached))
    assert calls


@gpu
@needs_hopper
@pytest.mark.parametrize("cached", CACHED)
def test_calls_with_different_numbers_of_jobs(triton_attention, calls, cached):
    """Each call starts at its first job, whatever the number of programs in the call before."""
    for queries in (3, 300, 1, 2):
        check(
            triton_attention,
            replace(WIDE, lens=((queries, 400),), heads=4, kv_heads=1, seed=queries, cached=cached),
        )
    assert calls


@gpu
@needs_hopper
def test_rows_index_a_larger_block_table(triton_attention, calls):
    case = replace(WIDE, device=torch.device("cuda", 0))
    inputs = make(case)
    q, k, v, starts, lens, table = inputs.arguments
    rows = torch.tensor([7, 2, 9, 0, 4], dtype=torch.int32, device=case.device)
    larger = torch.full((12, table.shape[1]), -(10**6), dtype=torch.int32, device=case.device)
    larger[rows.long()] = table
    out = triton_attention.paged_attention(
        q, k, v, starts, lens, larger, rows=rows, **case.bounds, **case.options
    )
    assert calls
    assert_rows_close(out, reference.paged_attention(*inputs.arguments, **case.options))


@gpu
@needs_hopper
@pytest.mark.parametrize("cached", CACHED)
def test_many_queries_without_context_yield_zeros(triton_attention, calls, cached):
    case = replace(
        WIDE, lens=((100, 100), (200, 200)), cached=cached, device=torch.device("cuda", 0)
    )
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    inputs.seq_lens[0] = 0
    inputs.block_table[0].fill_(-(10**6))
    out = triton_attention.paged_attention(*inputs.arguments, **case.bounds, **case.options)
    assert calls
    assert (out[:100] == 0).all()
    assert_rows_close(out[100:], expected[100:])


@gpu
@needs_hopper
def test_calls_on_two_streams_are_independent(triton_attention, calls):
    case = replace(
        WIDE, lens=((900, 900), (700, 1500)), heads=16, kv_heads=8, device=torch.device("cuda", 0)
    )
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [
        torch.full(inputs.q.shape, NAN, dtype=case.dtype, device=case.device) for _ in range(20)
    ]
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        with torch.cuda.stream(streams[i % 2]):
            triton_attention.paged_attention(
                *inputs.arguments, **case.bounds, **case.options, out=out
            )
    torch.cuda.synchronize()
    for out in outs:
        assert_rows_close(out, expected)


@gpu
@needs_hopper
def test_more_requests_than_one_search_covers(triton_attention, calls):
    lens = tuple((1 + 7 * i % 40, 1 + 7 * i % 40 + 11 * i % 90) for i in range(600))
    check(triton_attention, replace(WIDE, lens=lens), times=2)
    assert calls


@gpu
@needs_hopper
@pytest.mark.parametrize("cached", CACHED)
def test_more_jobs_than_programs_with_very_different_lengths(triton_attention, calls, cached):
    lens = ((900, 900), (1, 3000), (40, 2500), (700, 1500), (3, 3), (256, 4000))
    case = replace(WIDE, lens=lens, heads=16, kv_heads=8, cached=cached)
    check(triton_attention, case, times=3)
    assert calls


@gpu
@needs_hopper
def test_single_queries_of_long_contexts_use_the_decode_kernel(triton_attention, calls):
    device = torch.device("cuda", 0)
    case = replace(WIDE, lens=((1, 900), (30, 700)), device=device)
    inputs = make(case)
    out = triton_attention.paged_attention(
        *inputs.arguments, max_query_len=30, max_seq_len=10_000, **case.options
    )
    assert calls == [False]
    assert_close(out, reference.paged_attention(*inputs.arguments, **case.options))


@gpu
@needs_hopper
def test_padding_writes_nothing_and_no_context_yields_zeros(triton_attention, calls):
    case = replace(WIDE, lens=((4, 20), (3, 9), (1, 5)), device=torch.device("cuda", 0))
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    inputs.seq_lens[2] = 0
    inputs.block_table[2].fill_(-(10**6))
    last = inputs.query_start_loc[-1:]
    starts = torch.cat([inputs.query_start_loc, last, last])
    lens = torch.cat([inputs.seq_lens, torch.full((2,), 5, dtype=torch.int32, device=case.device)])
    table = torch.cat([inputs.block_table, torch.full_like(inputs.block_table[:2], -(10**6))])
    q = torch.cat([inputs.q, torch.full_like(inputs.q[:2], NAN)])
    out = torch.full_like(q, 7.0)
    caches = (inputs.k_cache, inputs.v_cache)
    triton_attention.paged_attention(
        q, *caches, starts, lens, table, max_query_len=4, max_seq_len=20, **case.options, out=out
    )
    assert calls
    assert_close(out[:7], expected[:7])
    assert (out[7] == 0).all()
    assert (out[8:] == 7).all()


@gpu
@needs_hopper
@pytest.mark.parametrize("cached", CACHED)
def test_captured_graphs_follow_the_lengths(triton_attention, calls, cached):
    lens = (200, 900), (1, 500), (9, 64)
    long = replace(WIDE, lens=lens, cached=cached, device=torch.device("cuda", 0))
    short = make(replace(long, lens=((200, 240), (1, 300), (9, 9)), seed=1))
    inputs = make(long)
    out = torch.full(inputs.q.shape, NAN, device=long.device, dtype=long.dtype)

    def attend() -> None:
        triton_attention.paged_attention(*inputs.arguments, **long.bounds, **long.options, out=out)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for step in (inputs, short):
        inputs.q.copy_(step.q)
        inputs.seq_lens.copy_(step.seq_lens)
        inputs.block_table[:, : step.block_table.shape[1]].copy_(step.block_table)
        inputs.k_cache[: step.k_cache.shape[0]].copy_(step.k_cache)
        inputs.v_cache[: step.v_cache.shape[0]].copy_(step.v_cache)
        out.fill_(NAN)
        graph.replay()
        assert_close(out, reference.paged_attention(*inputs.arguments, **long.options))
