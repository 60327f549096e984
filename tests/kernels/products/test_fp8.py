"""FP8: the reference against the list of all e4m3 numbers, Triton against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.combinations import pairwise
from toolkit.kernels import reference

NAN = float("nan")
INFINITY = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, in norm
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def fp8(triton):
    from toolkit.kernels.triton.products import fp8

    return fp8


def numbers() -> Tensor:
    """Return all finite e4m3 numbers in order: 4 exponent bits with bias 7, and 3 mantissa bits."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    positive = (subnormal + normal)[:-1]  # the last one is NaN
    return torch.tensor([-x for x in reversed(positive[1:])] + positive, dtype=torch.float64)


def nearest(x: Tensor) -> Tensor:
    """Return the nearest e4m3 numbers. Ties go to even, and values out of range to the last one."""
    table = numbers()
    distance = (x.double()[:, None] - table).abs()
    near = distance == distance.min(1, keepdim=True).values
    even = (torch.arange(len(table)) - len(table) // 2) % 2 == 0
    return table[(near * (1 + even.int())).argmax(1)]


def values(device: torch.device | str = "cpu") -> Tensor:
    """Return all e4m3 numbers, their midpoints, and numbers inside and outside the range."""
    torch.manual_seed(0)
    table = numbers()
    middles = (table[1:] + table[:-1]) / 2
    spread = torch.randn(3000) * torch.exp2(torch.linspace(-14, 12, 3000))
    return torch.cat((table, middles, spread)).float().to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_numbers_are_converted_exactly(triton, device, dtype):
    from tests.kernels.products.conversions import converted

    table = numbers()
    codes = torch.cat((table, table[:3])).to(device, torch.float32)  # 2^8 numbers
    found = converted(codes.to(reference.FP8), dtype)
    assert torch.equal(found.double(), codes.double())


def test_reference_rounds_to_nearest_and_saturates():
    x = values()
    torch.testing.assert_close(
        reference.rounded(x, reference.FP8).double(), nearest(x), rtol=0, atol=0
    )
    ends = reference.rounded(torch.tensor([INFINITY, -INFINITY, NAN]), reference.FP8).float()
    torch.testing.assert_close(ends, torch.tensor([448.0, -448.0, NAN]), equal_nan=True)


def test_reference_scales_the_greatest_of_each_row_to_448():
    x = torch.tensor([[1.0, -7.0, 3.5], [0.0, 0.0, 0.0], [1e-6, 0.0, 2e-6]])
    rows, scale = reference.quantize_fp8(x)
    assert rows[0].tolist() == [64.0, -448.0, 224.0]
    assert scale[0].item() == 7 / 448
    assert rows[1].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(rows.float() * scale, x)


def test_reference_product_equals_pytorch_with_the_scaled_weight():
    torch.manual_seed(0)
    weight, scale = reference.quantize_fp8(torch.randn(6, 20))
    x, bias = torch.randn(3, 20), torch.randn(6)
    wide = weight.float() * scale
    y = F.linear(x, wide, bias)
    scale = scale[:, 0]
    torch.testing.assert_close(reference.linear_scaled(x, weight, scale, bias, "gelu"), F.gelu(y))
    gate, up = y.chunk(2, dim=1)
    torch.testing.assert_close(
        reference.linear_scaled(x, weight, scale, bias, "silu", gated=True), F.silu(gate) * up
    )


# Triton: compiled if there is a GPU, else interpreted


def test_quantize_rounds_to_nearest(fp8, device):
    """The first column makes each row's scale 1, so the other columns are rounded unscaled."""
    x = values(device).clamp(-448, 448)
    x = F.pad(x, (0, -len(x) % 63)).view(-1, 63)
    rows, scale = fp8.quantize(torch.cat((torch.full_like(x[:, :1], 448), x), dim=1))
    assert (scale == 1).all()
    found = rows[:, 1:].double().cpu().flatten()
    torch.testing.assert_close(found, nearest(x.cpu().flatten()), rtol=0, atol=0)


@pytest.mark.on_cpu(
    "torch.float32-1", "torch.float32-4096", "torch.float16-100", "torch.bfloat16-768"
)
@pytest.mark.parametrize("size", [1, 100, 768, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_equals_reference(fp8, device, dtype, size):
    torch.manual_seed(0)
    x = (torch.randn(9, size) * torch.exp2(torch.arange(9) - 6.0)[:, None]).to(dtype).to(device)
    x[4] = 0
    rows, scale = fp8.quantize(x)
    expected_rows, expected_scale = reference.quantize_fp8(x)
    assert (rows.dtype, scale.shape) == (torch.float8_e4m3fn, (9, 1))
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0)
    torch.testing.assert_close(rows.float(), expected_rows.float(), rtol=0, atol=0)
    error = (rows.float() * scale - x.float()).abs()
    assert (error <= x.float().abs() / 16 + scale / 1024 * 1.001).all()


@pytest.mark.on_cpu("torch.float16-100", "torch.bfloat16-2500")
@pytest.mark.parametrize("size", [100, 2500, 14336])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_activations_are_rounded_twice(fp8, device, dtype, size):
    """To 16 bits, as where nothing is fused, and then to FP8."""
    from toolkit.kernels.triton.activation import activation, gated_activation

    torch.manual_seed(0)
    x = (3 * torch.randn(4, 2 * size, device=device)).to(dtype)
    x[1], x[2, 5] = 0, NAN
    for kind in ("silu", "gelu_tanh", "relu2"):
        for gated, apply in ((True, gated_activation), (False, activation)):
            rows, scale = fp8.quantize(x, kind, gated)
            expected, expected_scale = fp8.quantize(apply(x, kind))
            assert torch.equal(rows.view(torch.int8), expected.view(torch.int8))
            torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)


def test_quantize_keeps_nan_and_infinity(fp8, device):
    x = torch.ones(3, 64, device=device)
    x[0, 5], x[1, 6] = NAN, INFINITY
    rows, scale = fp8.quantize(x)
    if device.type == "cuda":  # the interpreter's e4m3 has no NaN
        assert (rows.float() * scale).isfinite().all(1).tolist() == [False, False, True]
    assert scale.isfinite().flatten().tolist()[1:] == [False, True]


def test_empty_inputs_have_empty_results(fp8, device):
    rows, scale = fp8.quantize(torch.empty(0, 64, device=device))
    assert (rows.shape, scale.shape) == ((0, 64), (0, 1))
    weight, scale = reference.quantize_fp8(torch.ones(8, 64, device=device))
    assert fp8.linear(torch.empty(0, 64, device=device), weight, scale[:, 0]).shape == (0, 8)


@dataclass(frozen=True)
class Case:
    tokens: int
    size: int
    in_features: int
    activation: str | None = None
    gated: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float32


def make(case: Case, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    rows = case.size * (2 if case.gated else 1)
    spread = torch.exp2(torch.linspace(-3, 3, rows))[:, None]  # so that rows have different scales
    weight, scale = reference.quantize_fp8(torch.randn(rows, case.in_features) * spread)
    return {
        "x": (torch.randn(case.tokens, case.in_features) / case.in_features**0.5)
        .to(case.dtype)
        .to(device),
        "weight": weight.to(device),
        "scale": scale[:, 0].contiguous().to(device),
        "bias": torch.randn(rows).to(case.dtype).to(device) if case.biased else None,
        "activation": case.activation,
        "gated": case.gated,
    }


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(
        min=1e-30
    )
    assert difference < TOLERANCE[actual.dtype]  # NaN fails too


def check(fp8, case: Case, device: torch.device) -> None:
    call = make(case, device)
    out = torch.full((case.tokens, case.size), NAN, dtype=case.dtype, device=device)
    assert fp8.linear(**call, out=out) is out
    assert_close(out, reference.linear_scaled(**call))


@pytest.mark.on_cpu(
    "torch.float16-(64, 768)-2",
    "torch.float16-(1040, 1024)-1",
    "torch.float16-(33, 100)-70",
    "torch.bfloat16-(48, 2100)-16",
    "torch.float32-(1, 1)-1",
)
@pytest.mark.parametrize(
    ("dtype", "sizes", "tokens"),
    pairwise(DTYPES, [(64, 768), (1040, 1024), (33, 100), (1, 1), (48, 2100)], [1, 2, 16, 70]),
    ids=str,
)
def test_products_of_any_size_and_dtype(fp8, device, dtype, sizes, tokens):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("on a GPU, FP8 weights need 16-bit activations (toolkit.weights.kinds.fp8)")
    check(fp8, Case(tokens, *sizes, dtype=dtype), device)


@pytest.mark.on_cpu(
    "end0-1-256-True",
    "end2-20-256-False",
    "end5-3-256-True",
    "end7-1-256-False",
    "end9-3-1100-False",
)
@pytest.mark.parametrize(
    ("end", "tokens", "in_features", "biased"),
    pairwise(
        [("silu", True), (None, True), ("gelu_tanh", False), ("gelu", False), ("relu2", False)],
        [1, 3, 20],
        [256, 1100],
        [True, False],
    ),
)
def test_bias_activation_and_gate(fp8, device, end, biased, in_features, tokens):
    activation, gated = end
    check(fp8, Case(tokens, 20, in_features, activation, gated, biased), device)


@pytest.mark.on_cpu("768-2-True", "6000-12-False", "40000-20-True")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [2, 12, 20])
@pytest.mark.parametrize("num_rows", [768, 6000, 40_000])
def test_best_tiles_cover_every_size(fp8, device, num_rows, tokens, gated):
    """The product has few outputs, to keep the interpreter fast."""
    from toolkit.kernels.triton.products import matmul

    for in_features in (512, 1040):
        tile = matmul.best_tile_of_fp8(tokens, num_rows, in_features)
        call = make(Case(tokens, tile.rows + 3, in_features, gated=gated, biased=True), device)
        out = torch.full((tokens, tile.rows + 3), NAN, device=device)
        matmul.matmul(**call, out=out, tile=tile)
        assert_close(out, reference.linear_scaled(**call))


def test_unsupported_inputs_are_errors(fp8):
    call = make(Case(2, 16, 32), torch.device("cpu"))
    with pytest.raises(ValueError, match="must be torch"):
        fp8.linear(**call | {"weight": call["weight"].float()})
    with pytest.raises(ValueError, match="contiguous"):
        fp8.linear(**call | {"x": call["x"].T.contiguous().T})
    with pytest.raises(ValueError, match="not one of"):
        fp8.linear(**call | {"activation": "swish"})
    with pytest.raises(ValueError, match="contiguous"):
        fp8.quantize(call["x"].T)
    with pytest.raises(ValueError, match="not one of"):
        fp8.quantize(call["x"], "swish")


# Real sizes, compiled


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "in_features", "activation", "gated"),
    [
        (6144, 4096, None, False),
        (4096, 14336, None, False),
        (14336, 4096, "silu", True),
        (3072, 768, "gelu_tanh", False),
        (768, 3072, None, False),
        (3072, 1024, "silu", True),
    ],
)
def test_products_of_real_sizes(fp8, device, size, in_features, activation, gated, dtype, tokens):
    check(
        fp8,
        Case(tokens, size, in_features, activation, gated, biased=not gated, dtype=dtype),
        device,
    )


@gpu
@needs_gpu
@pytest.mark.parametrize("size", [768, 14336, 28672])
def test_rows_of_real_sizes(fp8, device, size):
    x = torch.randn(2000, size, dtype=torch.bfloat16, device=device)
    rows, scale = fp8.quantize(x)
    expected_rows, expected_scale = reference.quantize_fp8(x)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0)
    torch.testing.assert_close(rows.float(), expected_rows.float(), rtol=0, atol=0)
