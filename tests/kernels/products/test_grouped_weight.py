"""Weights for the GPU's grouped kernels hold what the plain layouts hold."""

from __future__ import annotations

import pytest
import torch

from toolkit.distributed import full_shard
from toolkit.weights.groups import Groups, pack_nibbles
from toolkit.weights.kinds.integers import IntegerWeight
from toolkit.weights.layout import Kind, Layout, while_loading
from toolkit.weights.weight import Epilogue, Weight

ROWS, COLUMNS = 64, 256
LAYOUTS = {
    "int4": while_loading("int4", COLUMNS),
    "int4 with offsets": Layout(Kind.INTEGERS, 4, 32, scale_type="float16", offset_type="float32"),
    "int4 in another order": Layout(Kind.INTEGERS, 4, 64, scale_type="bfloat16", has_order=True),
    "int8": Layout(Kind.INTEGERS, 8),
}
each = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture
def new_weight(triton, device, monkeypatch):
    """Return a function from layouts to weights for the kernels, in bf16."""
    from toolkit.kernels import table
    from toolkit.weights.kinds import grouped

    monkeypatch.setattr(grouped, "triton_kernels_for", lambda _: table.gpu_kernels())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        yield lambda layout: grouped.grouped_weight(ROWS, COLUMNS, layout, device)
    torch.set_default_dtype(default)


def decoded(layout: Layout) -> Groups:
    """Return a random weight as a checkpoint stores it."""
    torch.manual_seed(0)
    groups = COLUMNS // layout.group if layout.group else 1
    scales = (torch.rand(ROWS, groups, dtype=torch.float32) + 0.5) / 99
    scales = scales.to(getattr(torch, layout.scale_type))
    values = torch.randint(0, 2**layout.bits, (ROWS, COLUMNS)).to(torch.uint8)
    return Groups(
        layout.bits,
        pack_nibbles(values) if layout.bits == 4 else values,
        scales,
        -scales.float() * 7 if layout.offset_type else None,
        torch.randperm(COLUMNS).int() if layout.has_order else None,
    )


def fill(weight: Weight, stored: Groups) -> None:
    """Write the weight in two parts."""
    for rows in (slice(0, 32), slice(32, ROWS)):
        weight.write(rows, stored.select(rows))


@each
def test_weight_has_the_numbers_that_were_written(new_weight, layout):
    weight, stored = new_weight(layout), decoded(layout)
    fill(weight, stored)
    dense = stored.dequantize()
    tolerance = {"rtol": 1e-6, "atol": 1e-6}  # a GPU fuses products and sums
    torch.testing.assert_close(weight.dequantize(), dense, **tolerance)
    torch.testing.assert_close(weight.dequantize(slice(16, 48)), dense[16:48], **tolerance)
    ids = torch.tensor([63, 0, 5, 5])
    torch.testing.assert_close(weight.take(ids), dense[ids].bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.on_cpu("3-int4", "3-int4 with offsets", "3-int8", "300-int4 in another order")
@each
@pytest.mark.parametrize("tokens", [3, 300])
def test_products_are_those_of_the_plain_layout(new_weight, layout, tokens):
    weight, stored = new_weight(layout), decoded(layout)
    fill(weight, stored)
    x, bias = torch.randn(tokens, COLUMNS), torch.randn(ROWS)
    y = weight.product(x, Epilogue(bias, "silu", gated=True))
    plain = IntegerWeight(ROWS, COLUMNS, layout)
    fill(plain, stored)
    expected = plain.product(x.float(), Epilogue(bias.float(), "silu", gated=True))
    assert (y.float() - expected).norm() < 0.01 * expected.norm()


@each
def test_rows_are_multiplied_and_keep_their_types(new_weight, layout):
    weight, stored = new_weight(layout), decoded(layout)
    fill(weight, stored)
    before = weight.dequantize()
    types = weight.scales.dtype
    weight.multiply(2.0**-3, slice(32, ROWS))
    before[32:] *= 2.0**-3
    torch.testing.assert_close(weight.dequantize(), before, rtol=1e-5, atol=1e-8)
    weight.multiply(2.0**-6)  # the end of fp16's range
    torch.testing.assert_close(weight.dequantize(), before * 2.0**-6, rtol=2**-6, atol=2e-6)
    assert weight.scales.dtype == types  # kernels were compiled for it


def test_weight_is_quantized_while_it_is_loaded(new_weight):
    layout = LAYOUTS["int4"]
    weight, plain = new_weight(layout), IntegerWeight(ROWS, COLUMNS, layout)
    dense = torch.randn(ROWS, COLUMNS)
    weight.store(slice(ROWS), dense)
    plain.store(slice(ROWS), dense)
    assert torch.equal(weight.dequantize(), plain.dequantize())
    shards = full_shard(ROWS), full_shard(COLUMNS)
    assert weight.part_slots(slice(ROWS), shards).keys() == {"weight"}


@each
def test_size_is_that_of_the_layout(new_weight, layout):
    weight = new_weight(layout)
    assert weight.nbytes == layout.nbytes(ROWS, COLUMNS, 2, on_gpu=True)
    assert weight.nbytes >= layout.nbytes(ROWS, COLUMNS, 2)


@each
def test_random_weights_have_the_usual_spread(new_weight, layout):
    weight = new_weight(layout)
    generator = torch.Generator(weight.values.device).manual_seed(0)
    weight.fill_randomly(generator)
    assert 0.015 < weight.dequantize().std().item() < 0.025
