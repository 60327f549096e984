"""Products with group-quantized weights, in all variants that run on this machine."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from toolkit.kernels import cpu, reference

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

from toolkit.kernels.cpu.groups import PackedGroups
from toolkit.kernels.cpu.program import Recorder
from toolkit.weights.groups import Groups, pack_nibbles
from toolkit.weights.kinds.packed import PackedWeight, pack_groups
from toolkit.weights.weight import Epilogue

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Case(NamedTuple):
    """A weight, the type of x, and the end of the product."""

    bits: int
    rows: int
    columns: int
    group: int
    numbers: torch.dtype  # type of scales and offsets
    has_offsets: bool
    x: torch.dtype
    activation: str | None = None
    gated: bool = False
    has_bias: bool = False


CASES = [
    Case(4, 64, 64, 32, FP16, True, FP32),
    Case(4, 70, 96, 16, BF16, False, BF16, "silu", True, True),
    Case(4, 33, 256, 128, FP32, True, BF16, "gelu", False, True),
    Case(4, 98, 256, 256, FP16, False, FP32, "relu", True),
    Case(4, 40, 52, 52, BF16, True, FP32),
    Case(4, 1, 144, 48, FP32, False, BF16, "relu2"),
    Case(8, 64, 64, 32, FP16, False, BF16, "gelu_tanh", True, True),
    Case(8, 70, 128, 64, BF16, True, FP32, None, False, True),
    Case(8, 33, 80, 16, FP32, True, BF16, "silu"),
    Case(8, 66, 51, 51, FP16, True, FP32, "gelu_quick", True),
    Case(8, 96, 288, 96, FP32, False, FP32),
]
"""Pairs of bits, group sizes, types and ends; partial panels and groups of all columns."""


@pytest.fixture(params=cpu.variants(), autouse=True)
def variant(request):
    before = cpu.num_threads()
    cpu.set_num_threads(2)
    with cpu.using(request.param):
        yield request.param
    cpu.set_num_threads(before)


def make_groups(case: Case) -> Groups:
    """Return a weight with products near 1. No two of its scales, or offsets, are equal."""
    torch.manual_seed(case.columns)
    values = torch.randint(0, 2**case.bits, (case.rows, case.columns), dtype=torch.uint8)
    scales = torch.rand(2, case.rows, case.columns // case.group) + 0.5
    scales = scales * case.columns**-0.5 / 2 ** (case.bits - 2)
    scales[0, 0, 0] *= -1
    offsets = -scales[1] * 2 ** (case.bits - 1) if case.has_offsets else None
    return Groups(
        case.bits,
        pack_nibbles(values) if case.bits == 4 else values,
        scales[0].to(case.numbers),
        None if offsets is None else offsets.to(case.numbers),
    )


def make_product(case: Case, groups: Groups) -> tuple[PackedGroups, torch.Tensor | None]:
    """Return (product, its bias)."""
    bias = torch.randn(case.rows) if case.has_bias else None
    product = PackedGroups(
        groups.values,
        groups.scales,
        groups.offsets,
        groups.bits,
        bias,
        activation=case.activation,
        gated=case.gated,
    )
    return product, bias


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return x in fp64 with 8 bits and a scale per block, as the kernels round it."""
    block = 32 if group % 32 == 0 or group == x.shape[1] else 16
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % block))
    blocks = padded.unflatten(1, (-1, block))
    scales = blocks.abs().amax(2, keepdim=True) / 127
    values = torch.where(scales > 0, (blocks * (1 / scales)).round(), 0.0)
    return (values.double() * scales.double()).flatten(1)[:, : x.shape[1]]


def expected(
    case: Case, x: torch.Tensor, groups: Groups, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the product in fp64."""
    y = x.double() @ groups.dequantize().double().T
    if bias is not None:
        y += bias.double()
    gate, up = y.chunk(2, dim=1) if case.gated else (y, 1.0)
    return (reference.ACTIVATIONS[case.activation](gate) if case.activation else gate) * up


def name(case: Case) -> str:
    return f"{case.bits}-{case.columns}-{case.group}-{str(case.numbers)[6:]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_products_equal_dequantized_weights(case):
    groups = make_groups(case)
    product, bias = make_product(case, groups)
    for rows in (1, 2, 5, 37, 120):
        x = (torch.randn(rows, case.columns) * torch.rand(rows, case.columns) * 2).to(case.x)
        y = product(x, FP32).double()
        close = expected(case, rounded(x, case.group), groups, bias)
        torch.testing.assert_close(y, close, atol=1e-5, rtol=1e-5)
        exact = expected(case, x, groups, bias)
        assert (y - exact).norm() < 0.05 * exact.norm()
        assert torch.equal(product(x, BF16), y.to(BF16))
        plain = case._replace(activation=None, gated=False)
        sums = expected(plain, rounded(x, case.group), groups, bias)
        torch.testing.assert_close(product.sums(x, FP32).double(), sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_rows_equal_the_dequantized_weight(case):
    groups = make_groups(case)
    product, _ = make_product(case._replace(gated=False, activation=None), groups)
    wanted = torch.tensor([case.rows - 1, 0, case.rows // 2, case.rows, -1], dtype=torch.int32)
    for dtype in (FP32, BF16):
        found = product.rows(wanted, dtype)
        assert torch.equal(found[:3], groups.dequantize()[wanted[:3]].to(dtype))
        assert torch.equal(found[3:], torch.zeros(2, case.columns, dtype=dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 20])
def test_sums_of_the_largest_values_are_exact(bits, rows):
    """16 bits hold sums of some products only."""
    signs = torch.randint(0, 2, (rows, 64)) * 2.0 - 1
    signs[0] = 1
    values = torch.full((40, 64), 2**bits - 1, dtype=torch.uint8)
    values = pack_nibbles(values) if bits == 4 else values
    for offsets in (None, torch.zeros(40, 1)):
        groups = Groups(bits, values, torch.ones(40, 1), offsets)
        y = PackedGroups(groups.values, groups.scales, offsets, bits)(127 * signs)
        assert torch.equal(y, 127 * signs @ groups.dequantize().T)
        assert torch.equal(-y, PackedGroups(values, groups.scales, offsets, bits)(-127 * signs))


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-30, 1e30])
def test_small_and_large_inputs(scale):
    groups = make_groups(CASES[0])
    product, bias = make_product(CASES[0], groups)
    x = torch.randn(3, 64) * scale
    exact = expected(CASES[0], x, groups, bias)
    error = (product(x).double() - exact).norm()
    assert error <= 0.03 * exact.norm() + 1e-36


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_affect_only_their_row(bad):
    for case in (CASES[0], CASES[9]):
        product, _ = make_product(case, make_groups(case))
        x = torch.randn(3, case.columns)
        x[1, 5] = bad
        y = product(x)
        assert not y[1].isfinite().any()
        assert y[[0, 2]].isfinite().all()


def test_scales_of_16_bits_keep_all_their_values():
    """fp16 has numbers without an implicit bit, and both have signs."""
    for dtype in (FP16, BF16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        scales = every[every.isfinite()].view(-1, 8)
        values = torch.full((len(scales), 128), 129, dtype=torch.uint8)
        product = PackedGroups(values, scales, None, 8)
        x = torch.zeros(8, 128)
        x[range(8), range(0, 128, 16)] = 127.0
        torch.testing.assert_close(product(x), 127 * scales.float().T, atol=0, rtol=1e-6)


def test_nbytes_counts_what_is_kept():
    case = CASES[0]
    groups = make_groups(case)
    product, _ = make_product(case, groups)
    assert product.nbytes == groups.nbytes == product.panels.nbytes
    with_bias, bias = make_product(case._replace(has_bias=True), groups)
    assert with_bias.nbytes == groups.nbytes + bias.nbytes


def test_products_are_recorded():
    case = CASES[0]
    product, _ = make_product(case, make_groups(case))
    x = torch.randn(3, case.columns)
    program, y = Recorder().record(lambda: product(product(x)))
    x.copy_(torch.randn(3, case.columns))
    program.run()
    assert len(program) == 2
    assert torch.equal(y, product(product(x)))


def test_empty_inputs_have_empty_results():
    product, _ = make_product(CASES[0], make_groups(CASES[0]))
    assert product(torch.empty(0, 64)).shape == (0, 64)


def test_weights_are_packed_for_products_and_rows():
    case = CASES[7]
    groups = make_groups(case)
    bias = torch.randn(case.rows)
    weight = pack_groups(groups, Epilogue(bias, "silu", dtype=FP32), BF16)
    assert isinstance(weight, PackedWeight)
    assert weight.shape == groups.shape
    x = torch.randn(3, case.columns).to(BF16)
    exact = expected(case._replace(activation="silu"), x, groups, bias)
    y = weight.product(x, Epilogue(bias, "silu", dtype=FP32))
    assert y.dtype == FP32
    torch.testing.assert_close(y.double(), exact, atol=0.05, rtol=0.05)
    sums = weight.product(x, Epilogue(bias, dtype=FP32)).double()
    torch.testing.assert_close(sums, expected(case, x, groups, bias), atol=0.05, rtol=0.05)
    assert torch.equal(weight.take(torch.tensor([5])), groups.dequantize()[5:6].to(BF16))


def test_unsupported_weights_are_errors():
    values, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="values must be uint8"):
        PackedGroups(values.int(), scales, None, 8)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        PackedGroups(values, scales, None, 2)
    with pytest.raises(ValueError, match=r"groups that divide 64, not \[4, 3\]"):
        PackedGroups(values, torch.ones(4, 3), None, 8)
    with pytest.raises(ValueError, match="groups that divide"):
        PackedGroups(values, scales, torch.ones(4, 1), 8)
    with pytest.raises(ValueError, match="multiple of 16 columns, not 8"):
        PackedGroups(values, torch.ones(4, 8), None, 8)
    with pytest.raises(ValueError, match="fp32, bfloat16 or fp16"):
        PackedGroups(values, scales.double(), None, 8)
    with pytest.raises(ValueError, match="odd"):
        PackedGroups(values[:3], scales[:3], None, 8, gated=True)
    with pytest.raises(ValueError, match="x must be"):
        PackedGroups(values, scales, None, 8)(torch.ones(1, 64, dtype=FP16))
