"""Head norms, rotation and cache writes: the reference against Transformers, Triton against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import reference
from toolkit.kernels.reference import HeadNorm

NAN = float("nan")
EPS = 0.1  # so large that leaving it out shows
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn
NORMS = ["rms fp32", "centered", "rms last", "centered fp32 per-head", "centered last per-head"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    rotary_size: int = 32  # 0: no rotation
    norm: str = ""  # words of `head_options`; "": none
    q_table: bool = False
    clip: float = 0.0
    tokens: int = 5
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None  # None: dtype
    heads_first: bool = False


def head_options(case: Case, device: torch.device) -> dict[str, object]:
    """Return random arguments of the transform.

    The norm is RMS norm unless it is `centered`. It may be `last` and of `values`, too, and its
    weights of each head (`per-head`) or in `fp32`."""
    angles = 6 * torch.rand(2, case.tokens, case.rotary_size // 2)
    tables = torch.stack((angles.cos(), angles.sin()), dim=2).to(case.dtype).to(device)
    per_head = "per-head" in case.norm
    weight_dtype = torch.float32 if "fp32" in case.norm else case.dtype
    q_weight = torch.rand(case.heads if per_head else 1, case.head_size) + 0.5
    k_weight = torch.rand(case.kv_heads if per_head else 1, case.head_size) - 1.5
    norm = HeadNorm(
        q_weight.to(weight_dtype).to(device),
        k_weight.to(weight_dtype).to(device),
        EPS,
        is_centered="centered" in case.norm,
        is_last="last" in case.norm,
        norms_values="values" in case.norm,
    )
    return {
        "cos_sin": tables[0] if case.rotary_size else None,
        "q_cos_sin": tables[1] if case.rotary_size and case.q_table else None,
        "norm": norm if case.norm else None,
        "clip": case.clip,
    }


@dataclass
class Inputs:
    qkv: Tensor
    slots: Tensor
    cache: Tensor  # [2, blocks, block_size, kv_heads, head_size]
    options: dict[str, object]

    def run(self, module) -> tuple[Tensor, Tensor]:
        """Return queries and the cache."""
        cache = self.cache.clone(memory_format=torch.preserve_format)
        q = module.qk_norm_rope_write(self.qkv, self.slots, cache[0], cache[1], **self.options)
        return q, cache


def make(case: Case, device: torch.device) -> Inputs:
    """Return random inputs. Slots are shuffled, some tokens have none, and unused slots are NaN."""
    torch.manual_seed(0)
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    num_blocks = 2 + -(-case.tokens // case.block_size)
    cache = torch.full((2, num_blocks, case.block_size, case.kv_heads, case.head_size), NAN)
    cache = cache.to(case.cached or case.dtype)
    if case.heads_first:
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    slots = torch.randperm(num_blocks * case.block_size)[: case.tokens]
    slots[case.tokens // 2 :: 3] = -1
    heads = {"num_heads": case.heads, "num_kv_heads": case.kv_heads}
    return Inputs(
        qkv=(2 * torch.randn(case.tokens, width + 8)).to(case.dtype).to(device)[:, :width],
        slots=slots.to(device),
        cache=cache.to(device),
        options=heads | head_options(case, device),
    )


@pytest.fixture(scope="session")
def rotary(triton):
    from toolkit.kernels.triton.attention import rotary

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


@pytest.mark.parametrize(
    ("rotary_size", "norm", "q_table", "clip"),
    pairwise(
        [32, 16, 0],
        ["", *NORMS],
        [False, True],
        [0.0, 0.7],
    ),
    ids=str,
)
def test_reference_equals_transformers(rotary_size, norm, q_table, clip):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = Case(rotary_size=rotary_size, norm=norm, q_table=q_table, clip=clip)
    inputs = make(case, torch.device("cpu"))
    q, cache = inputs.run(reference)
    heads = inputs.qkv.view(case.tokens, -1, case.head_size).clone()
    if clip:
        heads = heads.where(heads.abs() < clip, clip * heads.sign())
    both, v = [heads[:, :4], heads[:, 4:6]], heads[:, 6:]

    def normed() -> list[Tensor]:
        of = F.layer_norm if "centered" in norm else F.rms_norm
        weights = inputs.options["norm"].q_weight, inputs.options["norm"].k_weight
        return [of(x, (32,), eps=EPS) * weight for x, weight in zip(both, weights, strict=True)]

    if norm and "last" not in norm:
        both = normed()
    if rotary_size:
        tables = [inputs.options["cos_sin"]] * 2
        if q_table:
            tables[0] = inputs.options["q_cos_sin"]
        for x, table in zip(both, tables, strict=True):
            cos, sin = (part.repeat(1, 2) for part in table.unbind(1))
            part = x[..., :rotary_size].clone()
            x[..., :rotary_size] = apply_rotary_pos_emb(part, part, cos, sin, unsqueeze_dim=1)[0]
    if "last" in norm:
        both = normed()
    expected_q, k = both
    torch.testing.assert_close(q, expected_q)
    expected = inputs.cache.clone()
    reference.write_kv(k, v, expected[0], expected[1], inputs.slots)
    torch.testing.assert_close(cache, expected, equal_nan=True)


@pytest.mark.on_cpu("1-(3, 3)-0", "4-(1, 1)-0", "1-(14, 2)-32", "4-(71, 1)-0")
@pytest.mark.parametrize(
    ("tokens", "heads", "rotary_size"),
    pairwise([1, 4], [(1, 1), (3, 3), (14, 2), (71, 1)], [32, 0]),
    ids=str,
)
def test_every_head_grouping(rotary, device, tokens, heads, rotary_size):
    num_heads, num_kv_heads = heads
    check(
        rotary,
        Case(heads=num_heads, kv_heads=num_kv_heads, rotary_size=rotary_size, tokens=tokens),
        device,
    )


@pytest.mark.on_cpu(
    "(64, 0)--False-0.0-(torch.float32, None)",
    "(64, 0)-rms fp32-True-0.7-(torch.float16, None)",
    "(80, 32)-centered-False-0.7-(torch.bfloat16, None)",
    "(96, 96)-centered fp32 per-head-False-0.0-(torch.float16, None)",
    "(256, 256)-centered last per-head-False-0.7-(torch.float16, torch.float8_e4m3fn)",
    "(128, 64)-rms last-False-0.0-(torch.bfloat16, torch.float8_e4m3fn)",
)
@pytest.mark.parametrize(
    ("sizes", "norm", "q_table", "clip", "dtypes"),
    pairwise(
        [(64, 0), (80, 32), (96, 96), (128, 64), (256, 256)],
        ["", *NORMS],
        [False, True],
        [0.0, 0.7],
        [*((dtype, None) for dtype in DTYPES), (torch.float16, FP8), (torch.bfloat16, FP8)],
    ),
    ids=str,
)
def test_every_transform_of_every_head_size(rotary, device, sizes, norm, q_table, clip, dtypes):
    dtype, cached = dtypes
    case = Case(3, 3, *sizes, norm, q_table, clip, tokens=2, dtype=dtype, cached=cached)
    check(rotary, case, device)


@pytest.mark.on_cpu("1-True", "7-False", "16-True")
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_every_cache_layout(rotary, device, block_size, heads_first):
    case = Case(tokens=3, block_size=block_size, heads_first=heads_first, norm="rms")
    check(rotary, case, device)


@pytest.mark.parametrize("norm", ["rms values", "centered values last per-head"])
def test_values_are_normed_without_a_weight(rotary, device, norm):
    inputs = make(Case(norm=norm, rotary_size=16), device)
    (q, cache), (expected_q, expected) = inputs.run(rotary), inputs.run(reference)
    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(cache, expected, equal_nan=True)
    v = inputs.qkv[:, -2 * 32 :].view(-1, 2, 32)[inputs.slots >= 0]
    norm_of = F.layer_norm if "centered" in norm else F.rms_norm
    found = expected[1].flatten(0, 1)[inputs.slots[inputs.slots >= 0]]
    torch.testing.assert_close(found, norm_of(v, (32,), eps=EPS))


@pytest.mark.parametrize("norm", ["rms", "rms per-head"])
def test_queries_alone_are_turned(rotary, device, norm):
    """A layer that reads another's keys. The norm has no weight of its own for them."""
    inputs = make(Case(norm=norm), device)
    own = inputs.options["norm"]
    options = {"num_kv_heads": 0, "norm": replace(own, k_weight=own.q_weight[:1])}
    alone = replace(inputs, qkv=inputs.qkv[:, : 4 * 32], options=inputs.options | options)
    expected, _ = inputs.run(reference)
    for module in (reference, rotary):
        q, cache = alone.run(module)
        torch.testing.assert_close(q, expected)
        assert cache.isnan().all()


def test_fp8_caches_saturate(rotary, device):
    inputs = make(Case(dtype=torch.bfloat16, cached=FP8), device)
    inputs.qkv.mul_(1e4)
    q, cache = inputs.run(rotary)
    written = cache.float()[~cache.float().isnan()]
    assert len(written) == 2 * 2 * 32 * int((inputs.slots >= 0).sum())
    assert written.abs().max() == 448
    assert (written.abs() == 448).float().mean() > 0.9
    assert q.abs().max() > 1e4


def test_programs_may_process_several_tokens(rotary, device, monkeypatch):
    monkeypatch.setattr(rotary, "PROGRAMS", 4)
    check(rotary, Case(tokens=37, norm="rms"), device)
    check(rotary, Case(tokens=37, heads=5, kv_heads=5, rotary_size=0), device)
    check(rotary, Case(tokens=37, head_size=96), device)  # 64 entries do not rotate


def test_empty_inputs_write_nothing(rotary, device):
    q, cache = make(Case(tokens=0), device).run(rotary)
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
    table, weight = torch.zeros(4, 2, 16), torch.ones(2, 32)
    for options, message in (
        ({"cos_sin": table}, "angles of 5 tokens"),
        ({"q_cos_sin": table[:, :, :8]}, "angles of 5 tokens"),
        ({"cos_sin": None, "q_cos_sin": inputs.options["cos_sin"]}, "only if keys are"),
        ({"norm": HeadNorm(weight, weight, EPS)}, "for one head or 4 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(inputs, options=inputs.options | options).run(rotary)
