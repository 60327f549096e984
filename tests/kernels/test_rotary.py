"""Head norms, rotation and cache writes: the reference against Transformers, Triton against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import reference

NAN = float("nan")
EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    rotary_size: int = 32  # 0: no rotation
    normed: bool = False
    tokens: int = 5
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None  # None: dtype
    position_dtype: torch.dtype = torch.int64
    heads_first: bool = False


@dataclass
class Inputs:
    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor | None
    slots: Tensor
    cache: Tensor  # [2, blocks, block_size, kv_heads, head_size]
    options: dict[str, object]

    def run(self, module) -> tuple[Tensor, Tensor]:
        """Return queries and the cache."""
        cache = self.cache.clone(memory_format=torch.preserve_format)
        q = module.qk_norm_rope_write(
            self.qkv, self.positions, self.cos_sin, self.slots, cache[0], cache[1], **self.options
        )
        return q, cache


def make(case: Case, device: torch.device) -> Inputs:
    """Return random inputs. Slots are shuffled, some tokens have none, and unused slots are NaN."""
    torch.manual_seed(0)
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    positions = torch.randint(0, 50, (case.tokens,), dtype=case.position_dtype)
    angles = torch.rand(50, case.rotary_size // 2) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(case.dtype).to(device)
    num_blocks = 2 + -(-case.tokens // case.block_size)
    cache = torch.full((2, num_blocks, case.block_size, case.kv_heads, case.head_size), NAN)
    cache = cache.to(case.cached or case.dtype)
    if case.heads_first:
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    slots = torch.randperm(num_blocks * case.block_size)[: case.tokens]
    slots[case.tokens // 2 :: 3] = -1
    weights = {
        "q_weight": torch.rand(case.head_size) + 0.5,
        "k_weight": torch.rand(case.head_size) - 1.5,
    }
    options: dict[str, object] = {"num_heads": case.heads, "num_kv_heads": case.kv_heads}
    if case.normed:
        options |= {name: weight.to(case.dtype).to(device) for name, weight in weights.items()} | {
            "eps": EPS
        }
    return Inputs(
        qkv=(2 * torch.randn(case.tokens, width + 8)).to(case.dtype).to(device)[:, :width],
        positions=positions.to(device),
        cos_sin=cos_sin if case.rotary_size else None,
        slots=slots.to(device),
        cache=cache.to(device),
        options=options,
    )


@pytest.fixture(scope="session")
def rotary(triton):
    from toolkit.kernels.triton import rotary

    return rotary


def check(rotary, case: Case, device: torch.device) -> None:
    inputs = make(case, device)
    expected_q, expected_cache = inputs.run(reference)
    before = inputs.qkv.clone()
    q, cache = inputs.run(rotary)
    assert q.shape == (case.tokens, case.heads, case.head_size)
    tolerance = {"rtol": TOLERANCE[case.dtype], "atol": TOLERANCE[case.dtype]}
    torch.testing.assert_close(q, expected_q, **tolerance)
    assert cache.dtype == (case.cached or case.dtype)
    cache, expected_cache = cache.float(), expected_cache.float()
    if case.cached == FP8:
        # Rounding errors near the middle of two e4m3 numbers can change the rounded result.
        assert ((cache != expected_cache) & ~cache.isnan()).float().mean() < 0.02
        tolerance = {"rtol": 1 / 8, "atol": 2.0**-9}
    torch.testing.assert_close(cache, expected_cache, equal_nan=True, **tolerance)
    torch.testing.assert_close(cache[1], expected_cache[1], equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(inputs.qkv, before, rtol=0, atol=0)


@pytest.mark.parametrize("rotary_size", [32, 16, 0])
@pytest.mark.parametrize("normed", [True, False])
def test_reference_equals_transformers(rotary_size, normed):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = Case(rotary_size=rotary_size, normed=normed)
    inputs = make(case, torch.device("cpu"))
    q, cache = inputs.run(reference)
    heads = inputs.qkv.view(case.tokens, -1, case.head_size)
    expected_q, k, v = heads[:, :4].clone(), heads[:, 4:6].clone(), heads[:, 6:]
    if normed:
        expected_q = F.rms_norm(expected_q, (32,), inputs.options["q_weight"], EPS)
        k = F.rms_norm(k, (32,), inputs.options["k_weight"], EPS)
    if rotary_size:
        cos, sin = (x.repeat(1, 2) for x in inputs.cos_sin[inputs.positions].unbind(1))
        rotated = apply_rotary_pos_emb(
            expected_q[..., :rotary_size], k[..., :rotary_size], cos, sin, unsqueeze_dim=1
        )
        expected_q[..., :rotary_size], k[..., :rotary_size] = rotated
    torch.testing.assert_close(q, expected_q)
    expected = inputs.cache.clone()
    reference.write_kv(k, v, expected[0], expected[1], inputs.slots)
    torch.testing.assert_close(cache, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "sizes", "normed"),
    pairwise(
        DTYPES,
        [(32, 32), (64, 0), (80, 80), (80, 32), (96, 96), (128, 64), (256, 256)],
        [True, False],
    ),
    ids=str,
)
def test_heads_of_any_size_rotated_fully_or_partly(rotary, device, dtype, sizes, normed):
    head_size, rotary_size = sizes
    check(
        rotary,
        Case(head_size=head_size, rotary_size=rotary_size, normed=normed, dtype=dtype),
        device,
    )


@pytest.mark.parametrize(
    ("tokens", "heads", "rotary_size"),
    pairwise([1, 9], [(1, 1), (3, 3), (14, 2), (71, 1)], [32, 0]),
    ids=str,
)
def test_every_head_grouping(rotary, device, tokens, heads, rotary_size):
    num_heads, num_kv_heads = heads
    check(
        rotary,
        Case(heads=num_heads, kv_heads=num_kv_heads, rotary_size=rotary_size, tokens=tokens),
        device,
    )


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_every_cache_layout(rotary, device, block_size, heads_first):
    check(rotary, Case(block_size=block_size, heads_first=heads_first, normed=True), device)


@pytest.mark.parametrize(
    ("dtype", "sizes", "normed"),
    [
        (torch.float32, (32, 32), True),
        (torch.float16, (64, 0), False),
        (torch.bfloat16, (80, 32), True),
        (torch.bfloat16, (128, 128), False),
    ],
    ids=str,
)
def test_caches_in_fp8(rotary, device, dtype, sizes, normed):
    head_size, rotary_size = sizes
    check(
        rotary,
        Case(head_size=head_size, rotary_size=rotary_size, normed=normed, dtype=dtype, cached=FP8),
        device,
    )


def test_fp8_caches_saturate(rotary, device):
    inputs = make(Case(dtype=torch.bfloat16, cached=FP8), device)
    inputs.qkv.mul_(1e4)
    q, cache = inputs.run(rotary)
    written = cache.float()[~cache.float().isnan()]
    assert len(written) == 2 * 2 * 32 * int((inputs.slots >= 0).sum())
    assert written.abs().max() == 448
    assert (written.abs() == 448).float().mean() > 0.9
    assert q.abs().max() > 1e4


def test_positions_may_be_int32(rotary, device):
    check(rotary, Case(position_dtype=torch.int32), device)


def test_programs_may_process_several_tokens(rotary, device, monkeypatch):
    monkeypatch.setattr(rotary, "PROGRAMS", 4)
    check(rotary, Case(tokens=37, normed=True), device)
    check(rotary, Case(tokens=37, heads=5, kv_heads=5, rotary_size=0), device)


def test_empty_inputs_write_nothing(rotary, device):
    inputs = make(Case(), device)
    empty = replace(
        inputs, qkv=inputs.qkv[:0], positions=inputs.positions[:0], slots=inputs.slots[:0]
    )
    q, cache = empty.run(rotary)
    assert q.shape == (0, 4, 32)
    assert cache.isnan().all()


def test_unchanged_queries_are_a_view(rotary, device):
    inputs = make(Case(rotary_size=0), device)
    q, _ = inputs.run(rotary)
    assert q.data_ptr() == inputs.qkv.data_ptr()


def test_unsupported_inputs_are_errors(rotary):
    inputs = make(Case(), torch.device("cpu"))
    with pytest.raises(ValueError, match="not 3"):
        replace(inputs, options=inputs.options | {"num_heads": 3}).run(rotary)
    with pytest.raises(ValueError, match="must be in"):
        replace(inputs, cache=inputs.cache.half()).run(rotary)
    with pytest.raises(ValueError, match="contiguous"):
        replace(inputs, qkv=inputs.qkv.T.contiguous().T).run(rotary)
