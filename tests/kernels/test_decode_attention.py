"""Decode steps: head norms, rotation, cache writes and attention in one kernel or two."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from tests.combinations import pairwise
from tests.kernels import test_rotary
from tests.kernels.test_attention import DTYPES, FP8, NAN, TOLERANCE, Case, make
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


SHORT = ((3, 9), (1, 70), (0, 5), (4, 4), (2, 33), (4, 90))
"""A token and its drafts: (queries, context including them). One request is padding."""


@pytest.mark.parametrize(
    ("heads", "sizes", "window", "cap", "sinks", "cached", "splits", "indirect"),
    pairwise(
        [(4, 4), (14, 2), (5, 1), (16, 1)],
        [(32, 16), (80, 5), (128, 16), (256, 64)],
        [0, 1, 3, 40],
        [0.0, 2.0],
        [False, True],
        [None, FP8],
        [1, 2, 5],
        [False, True],
    ),
    ids=str,
)
def test_a_token_and_its_drafts(
    triton_attention,
    device,
    monkeypatch,
    heads,
    sizes,
    window,
    cap,
    sinks,
    cached,
    splits,
    indirect,
):
    """Each query sees the keys up to its own."""
    monkeypatch.setattr(triton_attention, "num_splits", lambda batch, longest: splits)
    monkeypatch.setattr(triton_attention, "prefill", lambda *_, **__: pytest.fail("not decode"))
    case = Case(
        SHORT, heads[0], heads[1], *sizes, torch.float16 if cached else torch.float32, cached,
        window, cap, sinks, device=device,
    )  # fmt: skip
    inputs = make(case)
    expected = reference.paged_attention(*inputs.arguments, **case.options)
    arguments, rows = list(inputs.arguments), None
    if indirect:
        rows = torch.randperm(len(SHORT), device=device).to(torch.int32)
        arguments[5] = torch.zeros_like(inputs.block_table)
        arguments[5][rows.long()] = inputs.block_table
    options = {"rows": rows, "max_query_len": 4, "max_seq_len": 90, "is_decode": True}
    actual = triton_attention.paged_attention(*arguments, **case.options, **options)
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert difference < TOLERANCE[case.dtype] * (4 if cached else 1)


def test_many_rows_are_left_to_the_kernel_of_prompts(triton_attention, device, monkeypatch):
    case = Case(((9, 30),), heads=16, kv_heads=2, device=device)
    inputs, calls = make(case), []
    monkeypatch.setattr(triton_attention, "decode", lambda *_, **__: calls.append("decode"))
    monkeypatch.setattr(triton_attention, "prefill", lambda *_, **__: calls.append("prefill"))
    for most in (8, 9):
        triton_attention.paged_attention(
            *inputs.arguments, **case.options, max_query_len=most, max_seq_len=30, is_decode=True
        )
    assert calls == ["decode", "prefill"]
