"""Weights of every format: loading, products, rows, and their layouts on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.combinations import pairwise
from toolkit.distributed import Shard, full_shard
from toolkit.kernels import cpu, reference
from toolkit.weights.groups import fill_randomly_
from toolkit.weights.kinds import packed
from toolkit.weights.quantization import new_weight, quantized
from toolkit.weights.weight import Epilogue

ROWS, COLUMNS = 44, 64
FORMATS = {
    "fp32": (None, torch.float32, 4.0, 1e-6),
    "bf16": (None, torch.bfloat16, 2.0, 1e-2),
    "fp8": ("fp8", torch.float32, 1.1, 0.05),
    "int8": ("int8", torch.float32, 1.1, 0.015),
    "int4": ("int4", torch.float32, 0.54, 0.11),
}
ROUNDING = {"int4": 0.11}
"""Error of weights in norm, for a format of less than 8 bits. Others: 0.05."""
"""(method, type of activations, bytes per number, error of products in norm) of each format."""
needs_kernels = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")


def make(format: str, rows: int = ROWS):
    """Return (weight, the numbers that it was loaded with)."""
    method, dtype, *_ = FORMATS[format]
    exact = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
    exact *= torch.linspace(0.1, 10, rows)[:, None]  # rows have different scales
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with quantized(method):
            weight = new_weight(rows, COLUMNS)
    finally:
        torch.set_default_dtype(previous)
    shards = full_shard(rows), full_shard(COLUMNS)
    for kind, slot in weight.part_slots(slice(None), shards).items():
        assert kind == "weight"
        assert slot.shape == exact.shape
        slot.fill(exact)
    return weight, exact


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


ENDS = [
    {},
    {"activation": "gelu"},
    {"activation": "silu", "gated": True},
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize(
    ("format", "end", "biased", "layout"),
    pairwise(list(FORMATS), ENDS, [True, False], ["loaded", "packed", "onednn"]),
    ids=str,
)
def test_products_equal_those_of_the_numbers(monkeypatch, format, end, biased, layout):
    if layout == "packed" and not cpu.available():
        pytest.skip(f"the CPU kernels: {cpu.problem()}")
    weight, exact = make(format)
    _, dtype, _, tolerance = FORMATS[format]
    torch.manual_seed(0)
    x, bias = torch.randn(5, COLUMNS).to(dtype), torch.randn(ROWS).to(dtype)
    end = Epilogue(bias if biased else None, **end)
    if layout == "onednn":
        monkeypatch.setattr(packed, "cpu", SimpleNamespace(available=lambda: False))
    if layout != "loaded":
        weight = weight.finish(end)
    y = weight.product(x, end)
    expected = reference.linear(x.float(), exact, end.bias, end.activation, end.gated)
    assert (y.dtype, y.shape) == (end.dtype or dtype, expected.shape)
    tolerance *= 1.5 if end.gated else 1.0  # two products
    assert relative(y, expected) < tolerance + 0.01 * (y.dtype == torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=needs_kernels)])
def test_rows_are_those_of_the_dequantized_weight(format, is_packed):
    weight, exact = make(format)
    dtype, bytes_per_number = FORMATS[format][1:3]
    wide = weight.dequantize()
    assert relative(wide, exact) < ROUNDING.get(format, 0.05)
    torch.testing.assert_close(weight.dequantize(slice(3, 7)), wide[3:7])
    if is_packed:
        weight = weight.finish(Epilogue())
    assert weight.has_rows
    assert weight.shape == (ROWS, COLUMNS)
    rows = 64 if format == "int4" and is_packed else ROWS  # whole panels of 32 rows
    assert 0.9 < weight.nbytes / (bytes_per_number * rows * COLUMNS) < 1.01
    ids = torch.tensor([3, 0, ROWS - 1, 3])
    assert torch.equal(weight.take(ids), wide[ids].to(dtype))
    shard = Shard(200, 100, ROWS)
    rows = weight.take_shard(ids + torch.tensor([100, 100, 100, 0]), shard)
    assert torch.equal(rows[:3], wide[ids[:3]].to(dtype))
    assert not rows[3].any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("factor", [0.25, 2.0**-20, 2.0**20])
def test_powers_of_two_multiply_rows_exactly(format, factor):
    weight, _ = make(format)
    expected = weight.dequantize()
    expected[4:9] *= factor
    weight.multiply(factor, slice(4, 9))
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_slots_arrange_parts_of_a_checkpoint(format):
    """A rank's rows and columns of a transposed tensor, and rows in another order."""
    weight, _ = make(format)
    error = ROUNDING.get(format, 0.05)
    torch.manual_seed(0)
    tensor = torch.randn(2 * COLUMNS, 90)
    shards = Shard(90, 30, 10), Shard(2 * COLUMNS, COLUMNS, COLUMNS)
    slot = weight.part_slots(slice(5, 15), shards, transpose=True)["weight"]
    assert slot.shape == tensor.shape
    region = tuple(slice(part.begin, part.begin + part.count) for part in slot.region)
    slot.fill(tensor[region])
    assert relative(weight.dequantize(slice(5, 15)), tensor[COLUMNS:, 30:40].T) < error
    ordered = torch.randn(6, COLUMNS)
    order = (4, 0, 5)
    shards = full_shard(6), full_shard(COLUMNS)
    weight.part_slots(slice(20, 23), shards, order=order)["weight"].fill(ordered)
    assert relative(weight.dequantize(slice(20, 23)), ordered[list(order)]) < error


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_random_integers_have_the_mean_of_the_middle(dtype):
    values = torch.empty(4000, dtype=dtype)
    fill_randomly_(values, 4, torch.Generator().manual_seed(0))
    numbers = values.int()[:, None] >> torch.arange(0, 8 * values.itemsize, 4) & 15
    counts = numbers.flatten().bincount(minlength=16).double() / numbers.numel()
    assert counts[0] == 0
    expected = torch.full((15,), 1 / 16).double()
    expected[7] = 2 / 16
    assert counts[1:] == pytest.approx(expected, abs=0.012)
    fill_randomly_(values, 8, torch.Generator().manual_seed(0))
    assert 0 in values.view(torch.uint8)
