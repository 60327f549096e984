"""Weights for the GPU's grouped kernels hold what the plain layouts hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.config import CacheConfig
from toolkit.distributed import full_shard
from toolkit.layers import Linear, OutputHead
from toolkit.models.memory import MemoryLayout, TokenMemory
from toolkit.models.model import WeightModule
from toolkit.weights.groups import Groups, pack_nibbles
from toolkit.weights.kinds.integers import IntegerWeight
from toolkit.weights.kinds.parted import PartedWeight
from toolkit.weights.layout import Kind, Layout, while_loading
from toolkit.weights.source import Source
from toolkit.weights.weight import Epilogue, Weight
from toolkit.worker.startup import expansion

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


@pytest.mark.on_cpu("int4 with offsets", "int4 in another order")
@each
def test_expanded_weight_multiplies_many_rows(new_weight, layout, monkeypatch):
    from toolkit.kernels import products
    from toolkit.kernels.triton.products import grouped

    monkeypatch.setattr(products, "most_grouped_tokens", lambda device: 64)  # as on Hopper
    weight, stored = new_weight(layout), decoded(layout)
    fill(weight, stored)
    x, end = torch.randn(65, COLUMNS), Epilogue(torch.randn(ROWS), "silu", gated=True)
    few, many = weight.product(x[:64], end), weight.product(x, end)
    weight.keep_expanded()
    assert weight.expanded_bytes == weight.expanded.nbytes == 2 * ROWS * COLUMNS
    assert weight.nbytes == layout.nbytes(ROWS, COLUMNS, 2, on_gpu=True)
    assert torch.equal(weight.product(x[:64], end), few)
    monkeypatch.setattr(grouped, "linear", None)  # what multiplied as many rows before
    torch.testing.assert_close(weight.product(x, end), many, rtol=0.02, atol=0.02 * many.std())


def test_weights_of_products_are_kept_expanded_if_there_is_room(new_weight):
    """Those of experts, which have other kernels, and of the head are not."""
    own, part, of_head, of_experts = (new_weight(LAYOUTS["int4"]) for _ in range(4))
    for weight in (own, part, of_head, of_experts):
        weight.fill_randomly(torch.Generator(own.values.device).manual_seed(0))
    product, parted = (Linear(COLUMNS, ROWS, Source(name), bias=False) for name in "ab")
    head = OutputHead(COLUMNS, ROWS)
    adapted = nn.Module()  # a weight with adapters has one without them
    adapted.base = own
    product.weight, head.weight = adapted, of_head
    parted.weight = PartedWeight([part, parted.weight])
    model = WeightModule()
    model.parts = nn.ModuleList([product, parted, head, nn.ModuleList([of_experts])])

    def keep(
        room: int, length: int = 160, others: int = 1, budget: int = 257, **cache: float
    ) -> int:
        """others: least answer of other ranks; budget: most tokens of a step."""
        world = SimpleNamespace(minimum=lambda own: min(own, others))
        config = SimpleNamespace(cache=CacheConfig(**cache))
        place = SimpleNamespace(world=world)
        setup = SimpleNamespace(
            config=config,
            place=place,
            max_num_seqs=4,
            max_model_len=length,
            token_budget=budget,
        )
        layers = [TokenMemory.of_keys(1, 64, 0)]
        layout = MemoryLayout.of(layers, 16, 2, 2).with_groups(length, 64)
        return expansion.keep_expanded(setup, model, layout, room)

    nbytes = 2 * 2 * ROWS * COLUMNS
    assert keep(8 * nbytes - 1) == 0
    assert keep(8 * nbytes, kv_cache_memory=1) == 0
    assert keep(8 * nbytes, others=0) == 0
    assert keep(8 * nbytes, budget=256) == 0
    assert keep(8 * nbytes, length=64) == 0  # a step has no more than four requests
    token_bytes = 2 * 64 * 2
    assert keep(8 * nbytes, length=7 * nbytes // token_bytes // 4 + 16) == 0
    assert own.expanded is None
    assert keep(8 * nbytes) == nbytes
    assert of_experts.expanded is None
    assert of_head.expanded is None
    assert own.expanded is not None
    torch.testing.assert_close(part.expanded.float(), part.dequantize(), rtol=2**-7, atol=0)


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
