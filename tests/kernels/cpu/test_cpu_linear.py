"""Products with packed weights, in all variants that run on this machine, against PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch

from toolkit.kernels import cpu, reference

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

from toolkit.kernels.cpu.linear import ACTIVATIONS, PackedLinear

pytestmark = pytest.mark.usefixtures("variant", "num_threads")

SHAPES = [
    (1, 32, 4),
    (1, 50, 7),
    (3, 98, 33),
    (8, 64, 128),
    (9, 70, 130),
    (29, 96, 257),
    (130, 66, 65),
    (130, 66, 64),
]
"""(rows, out, in): single rows; complete and partial tiles, panels and words; several blocks."""
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def make(rows: int, out: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return (x, weight, bias) with products near 1."""
    torch.manual_seed(rows + out + size)
    return (
        torch.randn(rows, size, dtype=dtype),
        torch.randn(out, size) * size**-0.5,
        torch.randn(out),
    )


def exact(x, weight, bias, activation, gated) -> torch.Tensor:
    return reference.linear(x.float(), weight.float(), bias, activation, gated)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, scale = reference.quantize_int8(weight)
    return rows, scale[:, 0]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("gated", [False, True])
def test_products_equal_reference(kind, gated):
    for shape, activation in zip(SHAPES, itertools.cycle(ACTIVATIONS), strict=False):
        x, weight, bias = make(*shape, KINDS[kind])
        weight = weight.to(KINDS[kind])
        linear = PackedLinear(weight, bias, activation=activation, gated=gated)
        torch.testing.assert_close(
            linear(x, torch.float32),
            exact(x, weight, bias, activation, gated),
            atol=1e-5,
            rtol=1e-5,
        )
        sums = exact(x, weight, bias, None, False)
        torch.testing.assert_close(linear.sums(x, torch.float32), sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_int8_products_equal_reference(dtype, gated):
    for shape, activation in zip(SHAPES, itertools.cycle(ACTIVATIONS), strict=False):
        x, weight, bias = make(*shape, dtype)
        rows, scale = quantized(weight)
        linear = PackedLinear(rows, bias, scale, activation=activation, gated=gated)
        expected = reference.linear_int8(x.float(), rows, scale, bias, activation, gated)
        torch.testing.assert_close(linear(x, torch.float32), expected, atol=1e-5, rtol=1e-5)
        sums = reference.linear_int8(x.float(), rows, scale, bias, None, False)
        torch.testing.assert_close(linear.sums(x, torch.float32), sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_from_zero(activation):
    x = torch.cat((torch.linspace(-120, 120, 999), torch.tensor([0.0, 1e-8, -1e-8])))[:, None]
    y = PackedLinear(torch.ones(1, 1), activation=activation)(x)
    torch.testing.assert_close(
        y, exact(x, torch.ones(1, 1), None, activation, False), atol=2e-6, rtol=2e-6
    )


def test_bf16_results_are_rounded_to_nearest():
    x, weight, bias = make(5, 40, 64, torch.bfloat16)
    linear = PackedLinear(weight.bfloat16(), bias)
    assert torch.equal(linear(x), linear(x, torch.float32).bfloat16())


def test_rows_are_independent():
    """A request's results must not depend on its batch."""
    x, weight, bias = make(33, 96, 200, torch.float32)
    for linear in (
        PackedLinear(weight, bias),
        PackedLinear(quantized(weight)[0], bias, quantized(weight)[1]),
    ):
        together = linear(x)
        for row in (0, 7, 32):
            torch.testing.assert_close(
                linear(x[row : row + 1])[0], together[row], atol=2e-6, rtol=2e-6
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_affect_only_their_row(kind, bad):
    x, weight, bias = make(3, 40, 64, torch.float32)
    x[1, 5] = bad
    scale = None
    if kind == "int8":
        weight, scale = quantized(weight)
    y = PackedLinear(weight.to(KINDS[kind]), bias, scale)(x if kind != "bf16" else x.bfloat16())
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


def test_int8_keeps_rows_of_zeros():
    weight, scale = quantized(torch.zeros(40, 64))
    assert torch.equal(PackedLinear(weight, None, scale)(torch.zeros(2, 64)), torch.zeros(2, 40))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_returns_rows_of_the_weight(kind):
    _, weight, _ = make(1, 70, 131, torch.float32)
    stored, scale = quantized(weight) if kind == "int8" else (weight.to(KINDS[kind]), None)
    rows = PackedLinear(stored, None, scale).rows(
        torch.tensor([3, 69, 0, 70, -1], dtype=torch.int32), torch.float32
    )
    expected = stored.float() * (scale[:, None] if scale is not None else 1)
    assert torch.equal(rows[:3], expected[[3, 69, 0]])
    assert torch.equal(rows[3:], torch.zeros(2, 131))


def test_empty_inputs_have_empty_results():
    assert PackedLinear(torch.ones(40, 8))(torch.empty(0, 8)).shape == (0, 40)


def test_unsupported_inputs_are_errors():
    linear = PackedLinear(torch.ones(40, 8))
    with pytest.raises(ValueError, match=r"x must be \[rows, 8\]"):
        linear(torch.ones(1, 9))
    with pytest.raises(ValueError, match="x must be"):
        linear(torch.ones(1, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="a weight must be"):
        PackedLinear(torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="must have scales"):
        PackedLinear(torch.ones(4, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="odd"):
        PackedLinear(torch.ones(5, 4), gated=True)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_int8_sums_of_the_largest_values_are_exact(rows):
    """Sums of two products fit into 16 bits; sums of more do not."""
    signs = torch.randint(0, 2, (40, 64)) * 2 - 1
    weight = (127 * signs).to(torch.int8)
    x = (127.0 * signs[:rows]).contiguous()
    y = PackedLinear(weight, None, torch.ones(40))(x)
    assert torch.equal(y, x @ weight.float().T)
    assert y.max() == 64 * 127 * 127
