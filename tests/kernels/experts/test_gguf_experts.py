"""Experts of GGUF files on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.gguf_writer import Stored, write
from tests.kernels.experts.test_quantized_experts import kernels as kernels
from toolkit.distributed import Group, expert_shards, parallel
from toolkit.gguf.file import TYPES
from toolkit.kernels.table import TritonKernels
from toolkit.layers import Projections, StackedExperts
from toolkit.weights.gguf.decode import dequantize
from toolkit.weights.gguf.packing import packings
from toolkit.weights.gguf.reader import read_header, slot_of
from toolkit.weights.loading.safetensors import read_mapped
from toolkit.weights.quantization import quantized
from toolkit.weights.source import Source

EXPERTS, HIDDEN, SIZE = 2, 256, 512
PARTS = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
SOURCES = [
    Projections(*(Source(f"model.layers.0.mlp.experts.{expert}.{part}_proj") for part in PARTS))
    for expert in range(EXPERTS)
]
SCALES = {"Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
"""Offsets in a block of its fp16 scales."""
CLASSES = {
    "Q8_0": "GroupedWeight",
    "Q4_K": "GroupedWeight",
    "Q6_K": "GroupedWeight",
    "MXFP4": "MXFP4Weight",
}


def blocks(name: str, count: int) -> torch.Tensor:
    """Return random blocks of a type, uint8 [count, bytes]."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    found = torch.randint(256, (count, kind.num_bytes)).byte()
    for at in SCALES.get(name, []):
        scales = torch.rand(count, 1) * 2e-4 / (16 if name == "Q6_K" else 1)
        found[:, at : at + 2] = scales.half().view(torch.uint8)
    if name == "MXFP4":
        found[:, 0] = torch.randint(118, 122, (count,))
    return found


@pytest.mark.on_cpu("('Q4_K', 'Q6_K')-features", "('MXFP4', 'MXFP4')-features")
@torch.inference_mode()
@pytest.mark.parametrize("splits", [None, "features"])
@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0"), ("Q4_K", "Q6_K"), ("MXFP4", "MXFP4")], ids=str)
def test_stacks_of_each_type(kernels, device, tmp_path, kinds, splits):
    torch.manual_seed(0)
    stored, weights = {}, {}
    for part, shape in PARTS.items():
        name = kinds[part == "down"]
        kind = next(kind for kind in TYPES.values() if kind.name == name)
        raw = blocks(name, EXPERTS * shape[0] * shape[1] // kind.block)
        stored[f"blk.0.ffn_{part}_exps.weight"] = Stored(
            name, (EXPERTS, *shape), raw.numpy().tobytes()
        )
        rows = raw.view(EXPERTS * shape[0], -1)
        weights[part] = dequantize(name, rows, shape[1]).view(EXPERTS, *shape)
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": EXPERTS}
    file = write(tmp_path / "m.gguf", metadata, stored)
    x = torch.randn(5, HIDDEN).bfloat16()
    ids = torch.tensor([[0, 1], [1, 0], [0, -1], [1, -1], [0, 1]]).int()
    shares = torch.rand(5, 2)
    total = torch.zeros(5, HIDDEN)
    for rank in range(1 if splits is None else 2):
        with parallel(Group(rank, 1 if splits is None else 2)):
            experts = make(file, kernels, device)
            total += experts(x.to(device), ids.to(device), shares.to(device)).float().cpu()
    held = type(experts.up).__name__, type(experts.down).__name__
    assert held == tuple(CLASSES[kind] for kind in kinds)
    expected = torch.zeros_like(total)
    for token, row in enumerate(x.float()):
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            if expert >= 0:
                gate, up, down = (weights[part][expert] for part in PARTS)
                expected[token] += share * (down @ (F.silu(gate @ row) * (up @ row)))
    assert (total - expected).norm() <= 0.01 * expected.norm()


def make(file: Path, kernels: TritonKernels, device: torch.device) -> StackedExperts:
    """Return this rank's experts, filled."""
    header = read_header(file)
    found = packings({tensor.name: tensor for tensor in header})
    with device, quantized(None, found):
        torch.set_default_dtype(torch.bfloat16)
        own, features = expert_shards(EXPERTS, SIZE)
        experts = StackedExperts(HIDDEN, features, SOURCES, own, "silu", kernels)
        torch.set_default_dtype(torch.float32)
    slots = experts.slots()
    reads = []
    for tensor in header:
        for slot in slots.pop(tensor.name).parts:
            part = tensor.part(slot.region)
            reads.append((part, slot_of(part, slot)))
            slot.announce()
    assert not slots
    read_mapped(reads)
    experts.arrange()
    return experts
