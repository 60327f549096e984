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
from toolkit.layers import Experts, ListedExperts, Projections, StackedExperts
from toolkit.weights.quantization import quantized
from toolkit.weights.source import Source

HIDDEN, SIZE, NUM_EXPERTS, CHOSEN = 16, 12, 6, 2
KERNELS = SimpleNamespace(experts=reference.experts)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
    return {
        f"{part}.{expert}.weight": torch.randn(shape)
        for part, shape in shapes.items()
        for expert in range(NUM_EXPERTS)
    }


SOURCES = [
    Projections(*(Source(f"{part}.{expert}") for part in ("gate", "up", "down")))
    for expert in range(NUM_EXPERTS)
]


def make(kind: str, tensors: dict[str, Tensor], own: Shard, size: Shard) -> Experts:
    """Return a rank's experts, filled."""
    experts: Experts
    if kind == "listed":
        experts = ListedExperts(HIDDEN, SIZE, SOURCES, own, "silu")
    else:
        experts = StackedExperts(HIDDEN, size, SOURCES, own, "silu", KERNELS)
    found = set()
    for module in experts.modules():
        slots = module.slots() if hasattr(module, "slots") else {}
        for name, slot in slots.items():
            found.add(name)
            assert slot.shape == tensors[name].shape
            for part in slot.parts:
                region = tuple(shard.entries for shard in part.region)
                part.fill(tensors[name][region])
    assert found == tensors.keys(), "those of other ranks are known, too"
    return experts


def expected(tensors: dict[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if expert < 0:
                continue
            gate, up, down = (
                tensors[f"{part}.{expert}.weight"].double() for part in ("gate", "up", "down")
            )
            row = x[token].double()
            out[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    return out


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
    with quantized("int8"), pytest.raises(ConfigError, match="not in other quantizations"):
        StackedExperts(
            HIDDEN, even_shard(SIZE, ""), SOURCES, full_shard(NUM_EXPERTS), "silu", KERNELS
        )
