"""CPU attention, and the norms, rotation and cache writes before it, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.attention import AttentionStep, Layer
from toolkit.kernels.reference import HeadNorm

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.problem()))

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
LENS: dict[str, list[tuple[int, int]]] = {
    "one token of one request": [(1, 1)],
    "one long request": [(1, 1000)],
    "next tokens": [(1, 5), (1, 300), (1, 1), (1, 64), (1, 33)],
    "prompts": [(40, 40), (7, 7), (1, 1), (129, 129)],
    "continued prompts and next tokens": [(33, 170), (1, 100), (2, 50), (16, 16), (1, 9), (5, 400)],
}
HEADS = {
    "own keys": (4, 4, 64),
    "groups": (12, 4, 128),
    "one key head": (20, 1, 32),
    "large": (2, 1, 256),
}
ODD_SIZES = (8, 12, 24, 40, 80, 96, 100, 500, 512)
DECODE_AND_PREFILL = LENS["continued prompts and next tokens"]


@dataclass
class Case:
    """A step over a cache of random numbers, in shuffled blocks. Unused blocks are NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor
    block_table: Tensor
    last_key: Tensor | None = None

    @property
    def step(self) -> AttentionStep:
        slots = torch.zeros(len(self.q), dtype=torch.int64)  # unused
        tensors = self.query_start_loc, self.seq_lens, self.rows, self.block_table
        return AttentionStep(slots, *tensors, self.last_key)

    def ours(self, **options: Any) -> Tensor:
        layer = Layer(
            self.k_cache,
            self.v_cache,
            self.q.shape[1],
            **options,
        )
        return layer.attend(self.q, self.step)

    def reference(self, **options: Any) -> Tensor:
        return reference.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.query_start_loc,
            self.seq_lens,
            self.block_table[self.rows.long()],
            last_key=self.last_key,
            **options,
        )


def make_case(
    lens: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int = 16,
) -> Case:
    num_heads, num_kv_heads, head_size = heads
    counts = [-(-context // block_size) for _, context in lens]
    num_blocks = sum(counts) + 3
    blocks = torch.randperm(num_blocks).int()
    table = torch.full((len(lens) + 2, max(counts) + 1), -(2**31), dtype=torch.int32)
    rows = torch.randperm(len(lens) + 2)[: len(lens)].int()
    caches = torch.full(
        (2, num_blocks, block_size, num_kv_heads, head_size), torch.nan, dtype=dtype
    )
    for row, count, (_, context) in zip(rows.tolist(), counts, lens, strict=True):
        table[row, :count], blocks = blocks[:count], blocks[count:]
        position = torch.arange(context)
        block = table[row, position // block_size].long()
        caches[:, block, position % block_size] = torch.randn(
            2, context, num_kv_heads, head_size, dtype=torch.float32
        ).to(dtype)
    starts = torch.tensor([0] + [queries for queries, _ in lens]).cumsum(0).int()
    # The backend passes queries as a view of q | k | v.
    qkv = torch.randn(int(starts[-1]), (num_heads + 2 * num_kv_heads) * head_size).to(dtype)
    q = qkv[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))
    seq_lens = torch.tensor([context for _, context in lens]).int()
    return Case(q, caches[0], caches[1], starts, seq_lens, rows, table)


@pytest.fixture(params=[1, 2, 5], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)


def assert_same(case: Case, **options: Any) -> None:
    options = {"scale": case.q.shape[2] ** -0.5} | options
    expected, found = case.reference(**options).float(), case.ours(**options).float()
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=TOLERANCE[case.q.dtype], rtol=1e-2)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_attention_equals_reference(
    lens: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, variant: str
) -> None:
    torch.manual_seed(0)
    with cpu.using(variant):
        assert_same(make_case(lens, heads, dtype))


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("size", ODD_SIZES)
def test_heads_of_any_size(size: int, variant: str) -> None:
    torch.manual_seed(0)
    with cpu.using(variant):
        for dtype in DTYPES:
            assert_same(make_case(DECODE_AND_PREFILL, (6, 3, size), dtype))


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("block_size", [1, 7, 32, 128])
def test_blocks_of_any_size(block_size: int, variant: str) -> None:
    torch.manual_seed(0)
    with cpu.using(variant):
        assert_same(make_case(DECODE_AND_PREFILL, (4, 2, 32), torch.float32, block_size))


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("window", [1, 20, 33, 5000])
def test_sliding_windows_hide_earlier_keys(window: int, variant: str) -> None:
    torch.manual_seed(0)
    with cpu.using(variant):
        for lens in LENS.values():
            assert_same(make_case(lens, (4, 2, 64), torch.float32), sliding_window=window)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("chunk", [20, 32])
def test_chunks_hide_the_keys_before_them(chunk: int, variant: str) -> None:
    torch.manual_seed(0)
    with cpu.using(variant):
        for lens in LENS.values():
            case = make_case(lens, (4, 2, 64), torch.float32)
            for row, (queries, context) in zip(case.rows.tolist(), lens, strict=True):
                unseen = torch.arange((context - queries) // chunk * chunk)
                block = case.block_table[row, unseen // 16].long()
                case.k_cache[block, unseen % 16] = case.v_cache[block, unseen % 16] = torch.nan
            assert_same(case, chunk=chunk)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("threads", [1, 5], ids="{} threads".format, indirect=True)
def test_runs_of_tokens_see_each_other(
    heads: tuple[int, int, int], threads: int, variant: str
) -> None:
    torch.manual_seed(0)
    lens = [(40, 40), (1, 50), (200, 230), (3, 20), (1, 9)]
    runs = [(2, 39), None, (60, 190), (17, 20), (5, 9)]  # first position and end
    last_keys = []
    for (queries, context), run in zip(lens, runs, strict=True):
        last = torch.arange(context).int()
        if run is not None:
            last[slice(*run)] = run[1] - 1
        last_keys.append(last[context - queries :])
    with cpu.using(variant):
        for dtype in DTYPES:
            case = make_case(lens, heads, dtype)
            case.last_key = torch.cat(last_keys)
            assert_same(case)
            assert_same(case, sliding_window=30, soft_cap=20.0)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((4, 2, 64), torch.float32),
        ((6, 3, 80), torch.bfloat16),
        ((8, 1, 96), torch.float32),
        ((4, 2, 256), torch.bfloat16),
        ((9, 3, 100), torch.float32),
    ],
    ids=str,
)
def test_soft_caps_bound_the_logits(
    heads: tuple[int, int, int], dtype: torch.dtype, variant: str
) -> None:
    torch.manual_seed(0)
    case = make_case(DECODE_AND_PREFILL, heads, dtype)
    with cpu.using(variant):
        assert_same(case, soft_cap=0.5, scale=1.0)
        assert_same(case, soft_cap=30.0, scale=1.0, sliding_window=40)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.usefixtures("threads")
def test_sinks_join_the_softmax(variant: str) -> None:
    torch.manual_seed(0)
    sinks = torch.tensor([-200.0, -1.0, 0.0, 2.0, 5.0, 200.0])
    with cpu.using(variant):
        for dtype in DTYPES:
            case = make_case([(1, 700), (33, 170), (1, 1)], (6, 2, 40), dtype)
            assert_same(case, sinks=sinks, sliding_window=400)


def test_threads_share_heads_and_keys_of_one_request(threads: int) -> None:
    torch.manual_seed(0)
    for heads in ((1, 1, 64), (2, 1, 128), (12, 12, 64)):
        for lens in ([(1, 3000)], [(3, 2000)], [(1, 700), (1, 2)], [(300, 900)]):
            assert_same(make_case(lens, heads, torch.float32))
            assert_same(make_case(lens, heads, torch.float32), sliding_window=500)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    torch.manual_seed(0)
    for scale in (300.0, -300.0):
        assert_same(make_case([(1, 200), (40, 90)], (2, 2, 64), torch.float32), scale=scale)


@pytest.mark.parametrize("variant", cpu.variants())
def test_nan_in_queries_reaches_the_output(variant: str) -> None:
    """The sampler ends requests whose logits are not finite. Attention must not hide them."""
    torch.manual_seed(0)
    with cpu.using(variant):
        for lens in ([(1, 100)], [(20, 20)]):
            case = make_case(lens, (1, 1, 64), torch.float32)
            case.q[-1, 0, 3] = torch.nan
            found = case.ours(scale=0.125)
            assert found[-1].isnan().all()
            assert found[:-1].isfinite().all()


def test_unsupported_inputs_are_errors() -> None:
    case = make_case([(1, 4)], (2, 2, 32), torch.float32)
    with pytest.raises(ValueError, match="both in fp32 or both in bfloat16"):
        Layer(case.k_cache, case.v_cache.bfloat16(), 2, scale=1.0)
    with pytest.raises(ValueError, match="must divide"):
        Layer(case.k_cache, case.v_cache, 3, scale=1.0)
    big = torch.zeros(1, 16, 1, 520)
    with pytest.raises(ValueError, match="at most 512"):
        Layer(big, big, 1, scale=1.0)
    for weight in (torch.ones(3, 32), torch.ones(1, 32).half(), torch.ones(32, 2).T):
        with pytest.raises(ValueError, match="the norm of 2 heads must be"):
            Layer(case.k_cache, case.v_cache, 2, scale=1.0, norm=HeadNorm(weight, weight, 1e-5))
    with pytest.raises(ValueError, match="the sinks of 2 heads"):
        Layer(case.k_cache, case.v_cache, 2, scale=1.0, sinks=torch.zeros(3))
    layer = Layer(case.k_cache, case.v_cache, 2, scale=1.0)
    with pytest.raises(ValueError, match="each of contiguous heads"):
        layer.attend(case.q.bfloat16(), case.step)
    with pytest.raises(ValueError, match="contiguous, not"):
        layer.write(torch.zeros(1, 64), case.step)
    for angles in (torch.zeros(1, 2, 17), torch.zeros(3, 2, 16), torch.zeros(1, 2, 16).bfloat16()):
        with pytest.raises(ValueError, match="the angles of 1 tokens must be"):
            layer.write(torch.zeros(1, 6 * 32), case.step, angles)
    with pytest.raises(ValueError, match="int64"):
        AttentionStep(*[torch.zeros(1)] * 4, torch.zeros(1, 1))
    long, int_ = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="lengths"):
        AttentionStep(long, int_, int_, int_, int_[None])
    starts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="lengths"):
        AttentionStep(long, starts, int_, int_, int_[None], starts)


NORMS: list[dict[str, bool] | None] = [
    None,
    {"is_per_head": False},
    {"is_per_head": True, "is_centered": True},
    {"is_per_head": False, "is_last": True},
    {"is_per_head": True, "is_centered": True, "is_last": True},
    {"is_per_head": False, "norms_values": True},
]


@pytest.mark.parametrize(
    ("variant", "norm", "sizes", "dtype", "num_tokens", "clip"),
    pairwise(
        cpu.variants(),
        NORMS,
        [(40, 12), (64, 0), (80, 40), (96, 16), (100, 50), (512, 256)],
        DTYPES,
        [1, 9, 400],
        [0.0, 0.7],
    ),
    ids=str,
)
def test_write_transforms_heads_and_stores_keys_and_values(
    variant: str,
    norm: dict[str, bool] | None,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    num_tokens: int,
    clip: float,
) -> None:
    torch.manual_seed(0)
    (size, half), num_heads, num_kv_heads, block_size = sizes, 6, 2, 16
    caches = torch.randn(2, 40, block_size, num_kv_heads, size).to(dtype)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size).add(0.2).to(dtype)
    slots = torch.randperm(40 * block_size)[:num_tokens]
    slots[num_tokens // 2] = -1
    cos_sin, q_cos_sin = torch.randn(2, num_tokens, 2, half).to(dtype) if half else (None, None)
    options: dict[str, Any] = {"clip": clip}
    if norm is not None:
        # Weights of one head are in the model's type; those of each head, in fp32.
        flags = dict(norm)
        is_per_head = flags.pop("is_per_head")
        heads, kind = ((num_heads, num_kv_heads), torch.float32) if is_per_head else ((1, 1), dtype)
        weights = (torch.randn(n, size).to(kind) for n in heads)
        options["norm"] = HeadNorm(*weights, 1e-5, **flags)
    angles = {"cos_sin": cos_sin, "q_cos_sin": q_cos_sin if clip else None}
    expected_caches = caches.clone()
    expected = reference.qk_norm_rope_write(
        qkv,
        slots,
        *expected_caches,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        **angles,
        **options,
    )
    zero, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with cpu.using(variant):
        layer = Layer(*caches, num_heads, scale=1.0, **options)
        found = layer.write(qkv, AttentionStep(slots, starts, zero, zero, zero[None]), **angles)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(caches, expected_caches, **tolerance)


@pytest.mark.parametrize("variant", cpu.variants())
def test_layer_without_keys_turns_queries_alone(variant: str) -> None:
    torch.manual_seed(0)
    case = make_case(DECODE_AND_PREFILL, (6, 2, 40), torch.float32)
    caches, count = (case.k_cache, case.v_cache), len(case.q)
    q, cos_sin = torch.randn(count, 6 * 40), torch.randn(count, 2, 20)
    weight = torch.randn(1, 40)
    norm, slots = HeadNorm(weight, weight, 1e-5), torch.arange(count)
    before = [cache.clone() for cache in caches]
    options: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 0, "norm": norm, "cos_sin": cos_sin}
    expected = reference.qk_norm_rope_write(q, slots, *caches, **options)
    with cpu.using(variant):
        layer = Layer(*caches, 6, scale=1.0, norm=norm, writes=False)
        case.q = layer.write(q, case.step, cos_sin)
        torch.testing.assert_close(case.q, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.attend(case.q, case.step), case.reference(scale=1.0))
    for cache, old in zip(caches, before, strict=True):
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", cpu.variants())
def test_clipping_keeps_nan(variant: str) -> None:
    caches = torch.zeros(2, 1, 16, 1, 40)
    zero = torch.zeros(1, dtype=torch.int32)
    step = AttentionStep(zero.long(), torch.zeros(2, dtype=torch.int32), zero, zero, zero[None])
    with cpu.using(variant):
        layer = Layer(*caches, 1, scale=1.0, clip=2.0)
        found = layer.write(torch.full((1, 120), torch.nan), step)
    assert found.isnan().all()
    assert caches[:, 0, 0].isnan().all()
