"""Experts on each rank add up to the sum of each token's experts, computed one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.distributed import Group, Shard, even_shard, expert_shards, full_shard, parallel
from toolkit.errors import ConfigError
from toolkit.kernels import reference
from toolkit.kernels.gates import ClampedSwiGLU
from toolkit.layers import Experts, ListedExperts, Projections, StackedExperts
from toolkit.weights.quantization import quantized
from toolkit.weights.source import RowOrder, Source, consecutive

HIDDEN, SIZE, NUM_EXPERTS, CHOSEN = 16, 12, 6, 2
KERNELS = SimpleNamespace(
    layer_of_experts=lambda *layer: lambda *rows: reference.experts(*rows, *layer)
)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
    return {
        f"{part}.{expert}.weight": torch.randn(shape)
        for part, shape in shapes.items()
        for expert in range(NUM_EXPERTS)
    }


PARTS = ("gate", "up", "down")
SOURCES = [
    Projections(*(Source(f"{part}.{expert}") for part in PARTS)) for expert in range(NUM_EXPERTS)
]


def make(
    kind: str,
    tensors: dict[str, Tensor],
    own: Shard,
    size: Shard,
    sources: list[Projections] = SOURCES,
    **options: object,
) -> Experts:
    """Return a rank's experts, filled."""
    experts: Experts
    given = {"activation": "silu"} | options
    if kind == "listed":
        experts = ListedExperts(HIDDEN, SIZE, sources, own, **given)
    else:
        experts = StackedExperts(HIDDEN, size, sources, own, kernels=KERNELS, **given)
    found = set()
    for module in experts.modules():
        slots = module.slots() if hasattr(module, "slots") else {}
        for name, slot in slots.items():
            found.add(name)
            assert slot.shape == tensors[name].shape
            for part in slot.parts:
                region = tuple(shard.entries for shard in part.region)
                part.fill(tensors[name][region])
    if isinstance(experts, StackedExperts):
        experts.arrange()
    assert found == tensors.keys(), "those of other ranks are known, too"
    return experts


def expected(tensors: dict[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute experts one by one. tensors: as in the fixture, with or without biases."""
    out = torch.zeros_like(x, dtype=torch.float64)
    has_bias = "gate.0.bias" in tensors
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if expert < 0:
                continue
            gate, up, down = (tensors[f"{part}.{expert}.weight"].double() for part in PARTS)
            row = x[token].double()
            if has_bias:  # gpt-oss's
                biases = (tensors[f"{part}.{expert}.bias"].double() for part in PARTS)
                gate_bias, up_bias, down_bias = biases
                gated = (gate @ row + gate_bias).clamp(max=2.5)
                wide = (up @ row + up_bias).clamp(-2.5, 2.5)
                inner = gated * torch.sigmoid(1.3 * gated) * (wide + 1)
                out[token] += weight * (down @ inner + down_bias)
            else:
                out[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    return out


def stacked(order: str) -> list[Projections]:
    """Return sources in one tensor for gate and up, and one for down, of all experts.

    They are as Granite's, or in turn as gpt-oss's."""
    both = 2 * SIZE
    orders = consecutive(SIZE, SIZE)
    if order == "in turn":
        orders = tuple(RowOrder(both, range(nth, both, 2)) for nth in range(2))
    is_other = order == "in turn"
    options = {"transpose": is_other, "is_bare": is_other}
    return [
        Projections(
            *(Source("gate_up", one, stack=(i, NUM_EXPERTS), **options) for one in orders),
            Source("down", stack=(i, NUM_EXPERTS), **options),
        )
        for i in range(NUM_EXPERTS)
    ]


def stack(tensors: dict[str, Tensor], order: str) -> dict[str, Tensor]:
    """Return the tensors of `stacked`."""
    found = {}
    for kind in ("weight", "bias"):
        gate, up, down = (
            torch.stack([tensors[f"{part}.{i}.{kind}"] for i in range(NUM_EXPERTS)])
            for part in PARTS
        )
        both = torch.cat((gate, up), 1)
        if order == "in turn":
            both = torch.stack((gate, up), 2).flatten(1, 2)
        end = f".{kind}"
        if order == "in turn":
            end = "" if kind == "weight" else "_bias"
        if kind == "weight" and order == "in turn":
            both, down = both.mT, down.mT
        found |= {f"gate_up{end}": both, f"down{end}": down}
    return found


@torch.inference_mode()
@pytest.mark.parametrize("order", ["one after the other", "in turn"])
@pytest.mark.parametrize("splits", [None, "experts", "features"])
@pytest.mark.parametrize("kind", ["listed", "stacked"])
def test_experts_of_one_tensor_with_biases(tensors, kind, splits, order):
    torch.manual_seed(1)
    for name in list(tensors):
        tensors[name.replace("weight", "bias")] = 2 * torch.randn(len(tensors[name]))
    ids = torch.tensor(CHOICES["with padding"], dtype=torch.int32)
    x, weights = 4 * torch.randn(len(ids), HIDDEN), torch.rand(len(ids), CHOSEN)
    total = torch.zeros(len(ids), HIDDEN)
    for rank in range(1 if splits is None else 2):
        group = Group(rank, 1 if splits is None else 2)
        with parallel(group, splits_experts=splits != "experts"):
            own, size = expert_shards(NUM_EXPERTS, SIZE)
            options = {"bias": True, "activation": ClampedSwiGLU(2.5, 1.3)}
            given = stack(tensors, order)
            total += make(kind, given, own, size, stacked(order), **options)(x, ids, weights)
    result = expected(tensors, x, ids, weights)
    assert (total - result).norm() <= 1e-5 * result.norm()


CHOICES = {
    "random": [[0, 3], [5, 1], [3, 0], [2, 4], [1, 5]],
    "one expert of all": [[4, 0]] * 5,
    "one token": [[5, 2]],
    "with padding": [[0, 1], [-1, -1], [1, 3], [-1, -1], [0, 1]],
    "padding": [[-1, -1]] * 3,
}


@torch.inference_mode()
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("splits", [None, "experts", "features"])
@pytest.mark.parametrize("kind", ["listed", "stacked"])
def test_ranks_add_up_to_the_sum_of_each_tokens_experts(tensors, kind, splits, choice):
    ids = torch.tensor(CHOICES[choice], dtype=torch.int32)
    x, weights = torch.randn(len(ids), HIDDEN), torch.rand(len(ids), CHOSEN)
    total = torch.zeros(len(ids), HIDDEN)
    for rank in range(1 if splits is None else 2):
        group = Group(rank, 1 if splits is None else 2)
        with parallel(group, splits_experts=splits != "experts"):
            total += make(kind, tensors, *expert_shards(NUM_EXPERTS, SIZE))(x, ids, weights)
    result = expected(tensors, x, ids, weights)
    assert (total - result).norm() <= 1e-5 * result.norm()


@torch.inference_mode()
def test_stacked_experts_in_fp8(tensors):
    ids, x = torch.tensor(CHOICES["random"], dtype=torch.int32), torch.randn(5, HIDDEN)
    weights = torch.rand(5, CHOSEN)
    with quantized("fp8"):
        experts = make("stacked", tensors, full_shard(NUM_EXPERTS), full_shard(SIZE))
    rounded = {}
    for name, tensor in tensors.items():
        values, scales = reference.quantize_fp8(tensor)
        rounded[name] = values.float() * scales
    result = expected(rounded, x, ids, weights)
    assert (experts(x, ids, weights) - result).norm() <= 1e-5 * result.norm()


def test_other_formats_of_stacked_experts_are_refused():
    with quantized("int8"), pytest.raises(ConfigError, match="run on GPUs with fp8 or"):
        StackedExperts(
            HIDDEN, even_shard(SIZE, ""), SOURCES, full_shard(NUM_EXPERTS), "silu", KERNELS
        )
