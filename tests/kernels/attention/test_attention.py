"""Paged attention and cache writes: the reference against PyTorch, Triton against the reference."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import reference

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, in norm
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@dataclass(frozen=True)
class Case:
    """A step. `lens` has (queries, context including them) of each request."""

    lens: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None  # None: dtype
    window: int = 0
    chunk: int = 0
    cap: float = 0.0
    sinks: bool = False
    runs: tuple[tuple[int, int, int], ...] = ()
    """(request, first position, end) of tokens that see each other."""
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def options(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 3, self.heads, device=self.device) if self.sinks else None
        given = {
            "scale": self.head_size**-0.5,
            "sliding_window": self.window,
            "chunk": self.chunk,
            "soft_cap": self.cap,
            "sinks": sinks,
        }
        return given | ({"last_key": self.last_key} if self.runs else {})

    @property
    def last_key(self) -> Tensor:
        """Return the position of the last key that each query sees."""
        found = []
        for request, (queries, context) in enumerate(self.lens):
            last = torch.arange(context)
            for own, begin, end in self.runs:
                if own == request:
                    last[begin:end] = end - 1
            found.append(last[context - queries :])
        return torch.cat(found).to(self.device, torch.int32)

    @property
    def bounds(self) -> dict[str, int]:
        return {
            "max_query_len": max(queries for queries, _ in self.lens),
            "max_seq_len": max(context for _, context in self.lens),
        }


@dataclass
class Inputs:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    keys: list[Tensor]  # per request, not paged
    values: list[Tensor]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
        )


def make(case: Case) -> Inputs:
    """Return random inputs in shuffled blocks.

    Keys and values that no query may read are NaN. Unused table entries point to a block of NaN.
    q is a view of a fused QKV projection, and K and V of a block are adjacent, so that no tensor is
    contiguous.
    """
    torch.manual_seed(case.seed)
    blocks_of = [math.ceil(context / case.block_size) for _, context in case.lens]
    num_blocks = sum(blocks_of) + 1
    cached = case.cached or case.dtype
    cache = torch.full(
        (num_blocks, 2, case.block_size, case.kv_heads, case.head_size), NAN, dtype=cached
    )
    numbers = (1 + torch.randperm(num_blocks - 1)).split(blocks_of)  # block 0 is unused
    table = torch.zeros(len(case.lens), max(blocks_of) + 1, dtype=torch.int32)
    keys, values = [], []
    for request, (queries, context) in enumerate(case.lens):
        table[request, : blocks_of[request]] = numbers[request]
        kv = torch.randn(2, context, case.kv_heads, case.head_size).to(cached)
        first_seen = max(0, reference.first_key(context - queries, case.window, case.chunk))
        for position in range(first_seen, context):
            block = numbers[request][position // case.block_size]
            cache[block, :, position % case.block_size] = kv[:, position]
        keys.append(kv[0].to(case.dtype))
        values.append(kv[1].to(case.dtype))
    counts = torch.tensor([0] + [queries for queries, _ in case.lens])
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    qkv = torch.randn(int(counts.sum()), width).to(case.dtype).to(case.device)
    cache = cache.to(case.device)
    return Inputs(
        q=qkv[:, : case.heads * case.head_size].unflatten(1, (case.heads, case.head_size)),
        k_cache=cache[:, 0],
        v_cache=cache[:, 1],
        query_start_loc=counts.cumsum(0).to(torch.int32).to(case.device),
        seq_lens=torch.tensor(
            [context for _, context in case.lens], dtype=torch.int32, device=case.device
        ),
        block_table=table.to(case.device),
        keys=keys,
        values=values,
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(
        min=1e-30
    )
    assert difference < TOLERANCE[actual.dtype]  # NaN fails too


# The reference


@pytest.mark.parametrize("cached", [None, FP8], ids=str)
@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_reference_equals_pytorch_on_unpaged_data(
    heads: int, kv_heads: int, window: int, cached: torch.dtype | None
):
    case = Case(
        ((1, 9), (3, 20), (6, 6)),
        heads=heads,
        kv_heads=kv_heads,
        block_size=7,
        window=window,
        cached=cached,
    )
    inputs = make(case)
    expected = []
    for request, (queries, context) in enumerate(case.lens):
        first, last = inputs.query_start_loc[request : request + 2].tolist()
        seen = [
            [key <= query and (window == 0 or query - key < window) for key in range(context)]
            for query in range(context - queries, context)
        ]
        k, v = (
            x.repeat_interleave(heads // kv_heads, 1)
            for x in (inputs.keys[request], inputs.values[request])
        )
        output = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (inputs.q[first:last], k, v)),
            attn_mask=torch.tensor(seen),
            scale=case.options["scale"],
        )
        expected.append(output.transpose(0, 1))
    assert_close(reference.paged_attention(*inputs.arguments, **case.options), torch.cat(expected))


@pytest.mark.parametrize("window", [0, 3, 8])
def test_reference_sees_runs_both_ways(window: int):
    case = Case(((9, 20), (6, 6)), runs=((0, 13, 18), (1, 0, 4)), window=window)
    inputs, expected = make(case), []
    for request, (queries, context) in enumerate(case.lens):
        first, last = inputs.query_start_loc[request : request + 2].tolist()
        _, begin, end = case.runs[request]
        query = torch.arange(context - queries, context)[:, None]
        key = torch.arange(context)
        seen = (key <= query) | ((query >= begin) & (query < end) & (key >= begin) & (key < end))
        if window:
            seen &= key > query - window
        q, k, v = inputs.q[first:last], inputs.keys[request], inputs.values[request]
        parts = (x.transpose(0, 1) for x in (q, *(y.repeat_interleave(2, 1) for y in (k, v))))
        output = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=case.options["scale"])
        expected.append(output.transpose(0, 1))
    assert_close(reference.paged_attention(*inputs.arguments, **case.options), torch.cat(expected))


@pytest.mark.parametrize("sinks", [False, True])
def test_reference_caps_logits_and_adds_sinks_by_the_formula(sinks):
    case = Case(((1, 5),), heads=2, kv_heads=1, cap=0.3, sinks=sinks)
    inputs = make(case)
    actual = reference.paged_attention(*inputs.arguments, **case.options)[0]
    keys, values = inputs.keys[0][:, 0].tolist(), inputs.values[0][:, 0]
    for q, sink, found in zip(inputs.q[0].tolist(), (-1, 3), actual, strict=True):
        dots = [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
        weights = [math.exp(0.3 * math.tanh(case.options["scale"] * dot / 0.3)) for dot in dots]
        total = sum(weights) + (math.exp(sink) if sinks else 0)
        expected = sum(
            weight / total * value for weight, value in zip(weights, values, strict=True)
        )
        assert_close(found, expected)


# Triton: compiled if there is a GPU, else interpreted


def check(triton_attention, case: Case, device: torch.device, *, is_decode: bool = False) -> None:
    case = replace(case, device=device)
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    out = torch.full(inputs.q.shape, NAN, dtype=case.dtype, device=device)
    actual = triton_attention.paged_attention(
        *inputs.arguments, **case.bounds, **case.options, out=out, is_decode=is_decode
    )
    assert actual is out
    assert_close(actual, expected)


DECODE = ((1, 9), (1, 1), (1, 33))
MIXED = ((1, 20), (5, 37), (6, 6), (1, 1))
"""A decode, a chunk after a prefix, a complete prompt, and a first token."""


@pytest.mark.on_cpu(
    "torch.float32-32-((1, 9), (1, 1), (1, 33))",
    "torch.float16-64-((1, 9), (1, 1), (1, 33))",
    "torch.bfloat16-80-((1, 9), (1, 1), (1, 33))",
    "torch.bfloat16-96-((1, 20), (5, 37), (6, 6), (1, 1))",
    "torch.float32-128-((1, 9), (1, 1), (1, 33))",
    "torch.float32-256-((1, 9), (1, 1), (1, 33))",
)
@pytest.mark.parametrize(
    ("dtype", "head_size", "lens"),
    pairwise(DTYPES, [32, 64, 80, 96, 128, 256], [DECODE, MIXED]),
    ids=str,
)
def test_every_head_size_and_dtype(triton_attention, device, dtype, head_size, lens):
    check(triton_attention, Case(lens, dtype=dtype, head_size=head_size), device)


@pytest.mark.on_cpu(
    "torch.float32-32-((1, 9), (1, 1), (1, 33))",
    "torch.float16-80-((1, 9), (1, 1), (1, 33))",
    "torch.bfloat16-128-((1, 9), (1, 1), (1, 33))",
    "torch.bfloat16-256-((1, 20), (5, 37), (6, 6), (1, 1))",
)
@pytest.mark.parametrize(
    ("dtype", "head_size", "lens"), pairwise(DTYPES, [32, 80, 128, 256], [DECODE, MIXED]), ids=str
)
def test_caches_in_fp8(triton_attention, device, dtype, head_size, lens):
    check(triton_attention, Case(lens, dtype=dtype, cached=FP8, head_size=head_size), device)
    check(
        triton_attention,
        Case(lens, dtype=dtype, cached=FP8, head_size=head_size, window=5, cap=2.0),
        device,
    )


def test_fp8_caches_accept_queries_beyond_fp16(triton_attention, device):
    case = replace(Case(DECODE, dtype=torch.bfloat16, cached=FP8), device=device)
    inputs = make(case)
    inputs.q[0, 0, 0] = 1e30
    out = triton_attention.paged_attention(*inputs.arguments, **case.bounds, **case.options)
    assert out.isfinite().all()


@pytest.mark.on_cpu("torch.float32-None-0", "torch.bfloat16-torch.float8_e4m3fn-5")
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    ("dtype", "cached"), [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, FP8)], ids=str
)
def test_largest_heads(triton_attention, device, dtype, cached, window):
    case = Case(MIXED, heads=8, kv_heads=1, head_size=512, dtype=dtype, cached=cached)
    check(triton_attention, replace(case, window=window), device)


@pytest.mark.on_cpu("1-decode", "7-mixed", "16-decode", "32-decode", "256-decode")
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 256])
def test_every_block_size(triton_attention, device, block_size, lens):
    check(triton_attention, Case(lens, block_size=block_size), device)


@pytest.mark.on_cpu(
    "3-3-mixed", "16-2-decode", "14-2-decode", "8-1-decode", "71-1-decode", "130-1-decode"
)
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 3), (8, 2), (16, 2), (14, 2), (8, 1), (71, 1), (130, 1)]
)
def test_every_head_grouping(triton_attention, device, heads, kv_heads, lens):
    check(triton_attention, Case(lens, heads=heads, kv_heads=kv_heads), device)


@pytest.mark.on_cpu(
    "((1, 9), (1, 1), (1, 33))-64-7-0-0.0-False",
    "((1, 9), (1, 1), (1, 33))-80-16-1-0.5-True",
    "((1, 20), (5, 37), (6, 6), (1, 1))-96-7-4-50.0-True",
    "((1, 9), (1, 1), (1, 33))-256-16-100-50.0-False",
    "((1, 9), (1, 1), (1, 33))-128-7-17-0.5-True",
)
@pytest.mark.parametrize(
    ("lens", "head_size", "block_size", "window", "cap", "sinks"),
    pairwise(
        [DECODE, MIXED],
        [64, 80, 96, 128, 256],
        [7, 16],
        [0, 1, 4, 17, 100],
        [0.0, 0.5, 50.0],
        [False, True],
    ),
    ids=str,
)
def test_windows_caps_and_sinks(
    triton_attention, device, lens, head_size, block_size, window, cap, sinks
):
    case = Case(
        lens, head_size=head_size, block_size=block_size, window=window, cap=cap, sinks=sinks
    )
    check(triton_attention, case, device)


@pytest.mark.on_cpu("True-24-lens0", "False-7-lens1", "False-24-lens2")
@pytest.mark.parametrize(
    "lens",
    [
        ((1, 24), (1, 25), (1, 49), (1, 3)),
        ((3, 24), (4, 26), (2, 49), (1, 50)),  # drafts across an edge
        ((60, 100), (1, 25), (23, 23), (2, 26)),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, 24, 200])
@pytest.mark.parametrize("sinks", [False, True])
def test_chunks_hide_the_keys_before_them(triton_attention, device, lens, chunk, sinks):
    is_decode = max(queries for queries, _ in lens) <= 4
    case = Case(lens, chunk=chunk, sinks=sinks, block_size=8)
    check(triton_attention, case, device, is_decode=is_decode)


def test_a_chunk_of_every_context_takes_the_plain_kernels(triton_attention, device, monkeypatch):
    found = []
    monkeypatch.setattr(
        triton_attention, "prefill", lambda batch, logits, **_: found.append(logits.chunk)
    )
    for chunk in (23, 24):
        case = replace(Case(((24, 24),), chunk=chunk), device=device)
        triton_attention.paged_attention(*make(case).arguments, **case.bounds, **case.options)
    assert found == [23, 0]


@pytest.mark.on_cpu("63-0", "64-50", "65-0", "130-0")
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("query_len", [63, 64, 65, 130])
def test_prompts_around_tile_sizes(triton_attention, device, query_len, window):
    lens = ((query_len, query_len), (1, 70), (query_len, query_len + 71))
    check(triton_attention, Case(lens, heads=2, kv_heads=1, window=window), device)


@pytest.mark.on_cpu("64-0-float32", "256-20-bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_runs_of_tokens_see_each_other(triton_attention, device, head_size, window, dtype):
    """The runs begin and end within tiles, span some, and touch."""
    lens = ((1, 50), (100, 140), (40, 40), (1, 33), (9, 9))
    runs = ((1, 45, 58), (1, 58, 130), (2, 0, 40), (3, 20, 33), (4, 2, 5))
    case = Case(lens, head_size=head_size, window=window, dtype=dtype, runs=runs)
    check(triton_attention, case, device)


def test_bounds_may_exceed_the_lengths(triton_attention, device):
    case = replace(Case(((1, 40),)), device=device)
    inputs = make(case)
    actual = triton_attention.paged_attention(
        *inputs.arguments, max_query_len=8, max_seq_len=64, **case.options
    )
    assert_close(actual, reference.paged_attention(*inputs.arguments, **case.options))


@pytest.mark.on_cpu("0", "1")
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_batches(triton_attention, device, seed):
    rng = random.Random(seed)
    lens = []
    for _ in range(rng.randint(1, 6)):
        queries = rng.choice([1, 1, rng.randint(2, 40)])
        lens.append((queries, queries + rng.choice([0, rng.randint(0, 90)])))
    kv_heads = rng.choice([1, 2])
    case = Case(
        tuple(lens),
        heads=kv_heads * rng.randint(1, 5),
        kv_heads=kv_heads,
        head_size=rng.choice([32, 80]),
        block_size=rng.choice([3, 16]),
        window=rng.choice([0, 0, rng.randint(1, 60)]),
        seed=seed,
    )
    check(triton_attention, case, device)


@pytest.mark.on_cpu("1-0-0.0-False", "2-0-0.0-True", "3-0-2.0-False", "8-40-2.0-True")
@pytest.mark.parametrize(
    ("splits", "window", "cap", "sinks"),
    pairwise([1, 2, 3, 8], [0, 40], [0.0, 2.0], [False, True]),
)
def test_key_splits_change_no_result(triton_attention, device, splits, window, cap, sinks):
    lens = ((1, 150), (1, 1), (1, 64), (1, 129))
    case = Case(lens, window=window, cap=cap, sinks=sinks, device=device)
    inputs = make(case)
    out = torch.full(inputs.q.shape, NAN, device=device)
    batch = triton_attention.Batch(*inputs.arguments, out)
    triton_attention.decode(batch, triton_attention.Logits(**case.options), splits)
    assert_close(out, reference.paged_attention(*inputs.arguments, **case.options))


@pytest.mark.on_cpu("30")
@pytest.mark.parametrize("window", [0, 30])
def test_long_context_bounds_split_single_queries(triton_attention, device, monkeypatch, window):
    monkeypatch.setattr(triton_attention, "_num_multiprocessors", lambda device: 16)
    case = replace(Case(((1, 150), (5, 80), (1, 1), (70, 70)), window=window), device=device)
    inputs = make(case)
    out = torch.full(inputs.q.shape, NAN, device=device)
    bounds = {"max_query_len": 70, "max_seq_len": 100_000}
    triton_attention.paged_attention(*inputs.arguments, **bounds, **case.options, out=out)
    assert_close(out, reference.paged_attention(*inputs.arguments, **case.options))


@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "sinks": True}, {"cached": FP8, "head_size": 128}], ids=str
)
def test_single_queries_of_many_requests_run_apart(triton_attention, device, monkeypatch, options):
    """Next to prompts, and to requests that pad a captured step."""
    monkeypatch.setattr(triton_attention, "MANY_REQUESTS", 4)
    calls = []
    for name in ("decode", "prefill"):
        kernel = getattr(triton_attention, name)
        monkeypatch.setattr(
            triton_attention,
            name,
            lambda *given, _name=name, _kernel=kernel, **more: (
                calls.append(_name),
                _kernel(*given, **more),
            ),
        )
    lens = ((1, 40), (6, 21), (1, 1), (0, 0), (19, 19), (1, 33), (0, 0))
    case = replace(Case(lens, dtype=torch.bfloat16, **options), device=device)
    inputs = make(case)
    out = torch.full(inputs.q.shape, NAN, device=device, dtype=inputs.q.dtype)
    triton_attention.paged_attention(*inputs.arguments, **case.bounds, **case.options, out=out)
    assert_close(out, reference.paged_attention(*inputs.arguments, **case.options))
    assert calls == ["decode", "prefill"]


@pytest.mark.parametrize("lens", [((1, 40), (1, 17), (1, 3)), ((5, 33), (1, 50), (20, 20))])
def test_rows_index_a_larger_block_table(triton_attention, device, lens):
    inputs = make(Case(lens, device=device))
    rows = torch.tensor([6, 0, 3], dtype=torch.int32, device=device)
    table = torch.full((8, inputs.block_table.shape[1]), -1, dtype=torch.int32, device=device)
    table[rows] = inputs.block_table
    bounds = Case(lens).bounds
    out = triton_attention.paged_attention(
        *inputs.arguments[:5], table, rows=rows, **bounds, **Case(lens).options
    )
    assert_close(out, reference.paged_attention(*inputs.arguments, **Case(lens).options))


@pytest.mark.parametrize("max_query_len", [1, 4])
def test_padding_requests_write_nothing(triton_attention, device, max_query_len):
    """In a captured graph, requests beyond the step's have no queries and no blocks."""
    case = replace(Case(((1, 20), (max_query_len, 30))), device=device)
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    tokens = len(inputs.q)
    pad = {
        "query_start_loc": torch.cat(
            (inputs.query_start_loc, inputs.query_start_loc[-1:].repeat(2))
        ),
        "seq_lens": F.pad(inputs.seq_lens, (0, 2)),
        "block_table": F.pad(inputs.block_table, (0, 0, 0, 2), value=-(10**6)),
        "q": F.pad(inputs.q, (0, 0, 0, 0, 0, 3), value=NAN),
    }
    padded = replace(inputs, **pad)
    out = torch.full(padded.q.shape, 7.0, device=device)
    bounds = {"max_query_len": max_query_len, "max_seq_len": 64}
    triton_attention.paged_attention(*padded.arguments, **bounds, **case.options, out=out)
    assert_close(out[:tokens], expected)
    assert (out[tokens:] == 7.0).all()


def test_queries_without_context_yield_zeros(triton_attention, device):
    inputs = make(replace(Case(((1, 5),)), device=device))
    inputs.seq_lens.zero_()
    inputs.block_table.fill_(-(10**6))
    out = triton_attention.paged_attention(
        *inputs.arguments, max_query_len=1, max_seq_len=8, scale=1.0
    )
    assert (out == 0).all()


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_other_cache_layouts_and_strided_outputs(triton_attention, device, lens):
    """The cache may be [blocks, heads, slots, size], and q and out slices along heads."""
    case = replace(Case(lens), device=device)
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    heads_first = replace(
        inputs,
        q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1),
        k_cache=inputs.k_cache.transpose(1, 2).contiguous().transpose(1, 2),
        v_cache=inputs.v_cache.transpose(1, 2).contiguous().transpose(1, 2),
        block_table=F.pad(inputs.block_table, (0, 3))[:, :-3],
    )
    wide = torch.full((len(inputs.q), 9, case.head_size), NAN, device=device)
    out = wide[:, 2 : 2 + case.heads]
    triton_attention.paged_attention(*heads_first.arguments, **case.bounds, **case.options, out=out)
    assert_close(out, expected)
    assert wide[:, :2].isnan().all()
    assert wide[:, 2 + case.heads :].isnan().all()


def test_unsupported_inputs_are_errors(triton_attention):
    inputs = make(Case(DECODE))
    call = {"max_query_len": 1, "max_seq_len": 64, "scale": 1.0}
    with pytest.raises(ValueError, match="share one dtype"):
        triton_attention.paged_attention(*replace(inputs, q=inputs.q.half()).arguments, **call)
    half_fp8 = replace(inputs, v_cache=inputs.v_cache.to(FP8))
    with pytest.raises(ValueError, match="share one dtype"):
        triton_attention.paged_attention(*half_fp8.arguments, **call)
    with pytest.raises(ValueError, match="evenly"):
        triton_attention.paged_attention(*replace(inputs, q=inputs.q[:, :3]).arguments, **call)
    with pytest.raises(ValueError, match="contiguous"):
        triton_attention.paged_attention(
            *replace(inputs, q=inputs.q.mT.contiguous().mT).arguments, **call
        )
    separate = replace(inputs, v_cache=inputs.v_cache.contiguous())
    with pytest.raises(ValueError, match="same strides"):
        triton_attention.paged_attention(*separate.arguments, **call)


def test_splits_are_as_many_as_fill_the_gpu(triton_attention, monkeypatch):
    monkeypatch.setattr(triton_attention, "_num_multiprocessors", lambda device: 132)

    def splits(num_reqs: int, max_seq_len: int) -> int:
        inputs = make(Case(((1, 1),) * num_reqs, heads=8, kv_heads=8))
        return triton_attention.num_splits(
            triton_attention.Batch(*inputs.arguments, inputs.q), max_seq_len
        )

    assert splits(256, 100_000) == 1
    assert splits(1, 64) == 1
    assert 8 <= splits(1, 2048) <= 32
    assert splits(1, 100_000) <= triton_attention.MAX_SPLITS
    assert 1 < splits(16, 4096) < splits(4, 4096)


# Writing the cache


@pytest.mark.parametrize("cached", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "head_size"), [(16, 2, 32), (7, 3, 80), (1, 1, 256), (4, 8, 160)]
)
@pytest.mark.parametrize("layout", ["slots first", "heads first"])
def test_write_kv_fills_only_the_given_slots(
    device, layout, block_size, kv_heads, head_size, dtype, cached
):
    torch.manual_seed(0)
    tokens = 9
    qkv = torch.randn(tokens, 4, kv_heads, head_size, device=device).to(dtype)
    k, v = qkv[:, 1], qkv[:, 2]
    cache = torch.full(
        (2, 12, block_size, kv_heads, head_size), NAN, dtype=cached or dtype, device=device
    )
    if layout == "heads first":
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    slots = torch.randperm(12 * block_size, device=device)[:tokens]
    slots[[2, 5]] = -1
    reference.write_kv(k, v, cache[0], cache[1], slots)

    expected = torch.full(
        (2, 12 * block_size, kv_heads, head_size), NAN, dtype=dtype, device=device
    )
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = k[token], v[token]
    expected = expected.to(cache.dtype).float()
    torch.testing.assert_close(
        cache.flatten(1, 2).float(), expected, rtol=0, atol=0, equal_nan=True
    )


def test_triton_tests_pass_in_a_new_process(triton_runs):
    """Only if they cannot run in this one."""
    if triton_runs:
        return
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parents[1])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


# Real sizes, compiled


@gpu
@needs_gpu
@pytest.mark.parametrize("cached", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 800),) * 64, heads=16, kv_heads=8, head_size=128),
        Case(((1, 1023), (1, 17), (1, 300)), heads=12, kv_heads=12, head_size=64),
        Case(((1, 5000),), heads=32, kv_heads=8, head_size=128, block_size=32),
        Case(((1, 3000), (1, 100)), heads=32, kv_heads=8, head_size=128, window=1024),
        Case(((1000, 1000), (333, 333), (1, 900)), heads=12, kv_heads=12, head_size=64),
        Case(((700, 700), (513, 2000), (1, 1500), (2, 2)), heads=32, kv_heads=8, head_size=128),
        Case(
            ((700, 1500), (1, 1500)), heads=16, kv_heads=4, head_size=96, window=256, block_size=7
        ),
        Case(((300, 900), (1, 700)), heads=8, kv_heads=4, head_size=256, cap=50.0),
        Case(((257, 600), (64, 64)), heads=71, kv_heads=1, head_size=64),
        Case(
            ((400, 900), (1, 700), (300, 300)),
            heads=8,
            kv_heads=4,
            head_size=256,
            window=200,
            runs=((0, 550, 806), (2, 10, 266)),
        ),
        Case(
            ((400, 900), (1, 700), (300, 300)),
            heads=16,
            kv_heads=8,
            head_size=128,
            runs=((0, 550, 806), (2, 10, 266)),
        ),
    ],
    ids=str,
)
def test_real_sizes(triton_attention, device, case, dtype, cached):
    check(triton_attention, replace(case, dtype=dtype, cached=cached), device)


@gpu
@needs_gpu
@pytest.mark.parametrize("queries", [1, 8])
def test_captured_graphs_follow_the_lengths_without_waiting(triton_attention, device, queries):
    long = replace(Case(((queries, 900), (1, 500), (1, 64))), device=device)
    short = make(replace(long, lens=((queries, 40), (1, 300), (1, 1)), seed=1))
    inputs = make(long)
    out = torch.full(inputs.q.shape, NAN, device=device)

    def attend() -> None:
        triton_attention.paged_attention(*inputs.arguments, **long.bounds, **long.options, out=out)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in (inputs, short):
        inputs.q.copy_(step.q)
        inputs.seq_lens.copy_(step.seq_lens)
        width = step.block_table.shape[1]
        inputs.block_table[:, :width].copy_(step.block_table)
        blocks = step.k_cache.shape[0]
        inputs.k_cache[:blocks].copy_(step.k_cache)
        inputs.v_cache[:blocks].copy_(step.v_cache)
        out.fill_(NAN)
        graph.replay()
        assert_close(out, reference.paged_attention(*inputs.arguments, **long.options))
