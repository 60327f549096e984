"""Products with packed weights, in every variant that this machine can run, against plain PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch

from toolkit.kernels import cpu, reference

if not cpu.available():
    pytest.skip(f"the CPU kernels: {cpu.problem()}", allow_module_level=True)

from toolkit.kernels.cpu.linear import PackedLinear

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
"""(rows, out, in): single rows, whole and broken tiles, panels and words; more rows than one block has."""
ACTIVATIONS = [None, "silu", "relu", "gelu", "gelu_tanh"]
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@pytest.fixture(params=cpu.variants(), autouse=True)
def variant(request):
    with cpu.using(request.param):
        yield request.param


@pytest.fixture(params=[1, 2], autouse=True)
def num_threads(request):
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)


def make(rows: int, out: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(x, weight, bias), of values whose products are near 1."""
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
def test_products_equal_the_reference(kind, gated):
    for shape, activation in zip(SHAPES, itertools.cycle(ACTIVATIONS), strict=False):
        x, weight, bias = make(*shape, KINDS[kind])
        weight = weight.to(KINDS[kind])
        y = PackedLinear(weight, bias, activation=activation, gated=gated)(x, torch.float32)
        torch.testing.assert_close(
            y, exact(x, weight, bias, activation, gated), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_int8_rounds_weights_and_tokens_as_the_reference_does(dtype, gated):
    for shape, activation in zip(SHAPES, itertools.cycle(ACTIVATIONS), strict=False):
        x, weight, bias = make(*shape, dtype)
        rows, scale = quantized(weight)
        y = PackedLinear(rows, bias, scale, activation=activation, gated=gated)(x, torch.float32)
        expected = reference.linear_int8(x.float(), rows, scale, bias, activation, gated)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_right_far_from_zero(activation):
    x = torch.cat((torch.linspace(-120, 120, 999), torch.tensor([0.0, 1e-8, -1e-8])))[:, None]
    y = PackedLinear(torch.ones(1, 1), activation=activation)(x)
    torch.testing.assert_close(
        y, exact(x, torch.ones(1, 1), None, activation, False), atol=2e-6, rtol=2e-6
    )


def test_results_in_bf16_are_rounded_to_the_nearest():
    x, weight, bias = make(5, 40, 64, torch.bfloat16)
    linear = PackedLinear(weight.bfloat16(), bias)
    assert torch.equal(linear(x), linear(x, torch.float32).bfloat16())


def test_a_row_does_not_depend_on_the_others():
    """What a request gets must not change with the batch that it is in."""
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
def test_a_value_that_is_no_number_spoils_its_own_row_only(kind, bad):
    x, weight, bias = make(3, 40, 64, torch.float32)
    x[1, 5] = bad
    scale = None
    if kind == "int8":
        weight, scale = quantized(weight)
    y = PackedLinear(weight.to(KINDS[kind]), bias, scale)(x if kind != "bf16" else x.bfloat16())
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


def test_rows_of_zeros_stay_zeros_in_int8():
    weight, scale = quantized(torch.zeros(40, 64))
    assert torch.equal(PackedLinear(weight, None, scale)(torch.zeros(2, 64)), torch.zeros(2, 40))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_weight_come_back(kind):
    _, weight, _ = make(1, 70, 131, torch.float32)
    stored, scale = quantized(weight) if kind == "int8" else (weight.to(KINDS[kind]), None)
    rows = PackedLinear(stored, None, scale).rows(
        torch.tensor([3, 69, 0, 70, -1], dtype=torch.int32), torch.float32
    )
    expected = stored.float() * (scale[:, None] if scale is not None else 1)
    assert torch.equal(rows[:3], expected[[3, 69, 0]])
    assert torch.equal(rows[3:], torch.zeros(2, 131))


def test_no_rows_give_no_rows():
    assert PackedLinear(torch.ones(40, 8))(torch.empty(0, 8)).shape == (0, 40)


def test_what_does_not_fit_is_refused_in_words():
    linear = PackedLinear(torch.ones(40, 8))
    with pytest.raises(ValueError, match=r"x is \[rows, 8\]"):
        linear(torch.ones(1, 9))
    with pytest.raises(ValueError, match="x is"):
        linear(torch.ones(1, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="a weight is"):
        PackedLinear(torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="has scales"):
        PackedLinear(torch.ones(4, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="odd"):
        PackedLinear(torch.ones(5, 4), gated=True)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_int8_sums_of_the_largest_values_are_exact(rows):
    """Sums of two products take 16 bits, and of more than two do not fit."""
    signs = torch.randint(0, 2, (40, 64)) * 2 - 1
    weight = (127 * signs).to(torch.int8)
    x = (127.0 * signs[:rows]).contiguous()
    y = PackedLinear(weight, None, torch.ones(40))(x)
    assert torch.equal(y, x @ weight.float().T)
    assert y.max() == 64 * 127 * 127
