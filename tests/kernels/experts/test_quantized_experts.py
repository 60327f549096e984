"""Experts on a GPU, from checkpoints that other tools quantized: the MLPs of each layer are two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.combinations import pairwise
from toolkit.distributed import Group, expert_shards, parallel
from toolkit.kernels.table import TritonKernels, gpu_kernels
from toolkit.layers import Linear, Projections, StackedExperts
from toolkit.models.build import build_model, load_config
from toolkit.weights import quantization
from toolkit.weights.formats import read_packings
from toolkit.weights.kinds import blocks, fp8, grouped
from toolkit.weights.layout import of_experts
from toolkit.weights.loading.loader import load_weights, stored_tensors
from toolkit.weights.quantization import quantized
from toolkit.weights.source import Source
from toolkit.weights.weight import StackableWeight

QUANTIZED = Path(__file__).parents[2] / "weights" / "quantized"
LAYERS = {
    "gptq-4bit-g128": "GroupedWeight",
    "gptq-v2-4bit-g64-asym": "GroupedWeight",
    "gptq-4bit-g32-asym-act-order": "GPUWeight",
    "awq-gemm-g64": "GroupedWeight",
    "gptq-8bit-channel": "GroupedWeight",
    "autoround-gptq-mixed": "GroupedWeight",
    "ct-w8a16-channel": "GPUWeight",
    "ct-fp8-channel-dynamic": "FP8Weight",
    "fp8-block": "BlockWeight",
    "ct-fp8-block": "GPUWeight",
}
"""The class that holds gate and up of each checkpoint. Those of two layouts are expanded."""
UNEVEN = ("ct-fp8-block",)
PARTS = ("gate_proj", "up_proj", "down_proj")
SOURCES = [
    Projections(*(Source(f"model.layers.{layer}.mlp.{part}") for part in PARTS))
    for layer in range(2)
]


@pytest.fixture
def kernels(triton, device, monkeypatch) -> TritonKernels:
    """Let the weights of this process be those of a GPU."""
    found = gpu_kernels()
    assert found is not None
    for module in (blocks, fp8, grouped, quantization):
        monkeypatch.setattr(module, "triton_kernels_for", lambda _: found)
    monkeypatch.setattr(fp8, "has_arithmetic", lambda _: True)
    monkeypatch.setattr(quantization, "_multiplies_int8", lambda: False)  # as CPUs do
    monkeypatch.setattr("toolkit.weights.kinds.plain.triton_kernels_for", lambda _: found)
    return found


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of all projections, in fp64: other tests compare them with a peer's."""
    config = load_config(folder)
    model = build_model(config, device=torch.device("cpu"), dtype=torch.float32, max_model_len=64)
    load_weights(model, folder, "auto")
    weights = {}
    for module in model.modules():
        if isinstance(module, Linear):
            first = 0
            for source, part in zip(module.sources, module.parts, strict=True):
                rows = slice(first, first + part.count)
                weights[source.name] = module.weight.dequantize(rows).double()
                first += part.count
    return weights


def make(folder: Path, kernels: TritonKernels, device: torch.device) -> StackedExperts:
    """Return this rank's experts, filled."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    hidden, size = config["hidden_size"], config["intermediate_size"]
    packings = read_packings(config, {one.name: one for one in stored_tensors(folder)})
    with device, quantized(None, packings):
        torch.set_default_dtype(torch.bfloat16)
        own, features = expert_shards(2, size)
        experts = StackedExperts(hidden, features, SOURCES, own, "silu", kernels)
        torch.set_default_dtype(torch.float32)
    slots = experts.slots()
    used = {name for name in tensors if ".mlp." in name}
    assert used <= slots.keys(), "also those of other ranks"
    parts = [(tensors[name], part) for name in sorted(used) for part in slots[name].parts]
    for _, part in parts:
        part.announce()
    for tensor, part in parts:
        region = tuple(shard.entries for shard in part.region)
        part.fill((tensor[region] if region else tensor).to(device))
    experts.arrange()
    return experts


@pytest.mark.on_cpu(
    "autoround-gptq-mixed-None-1",
    "awq-gemm-g64-experts-1",
    "ct-fp8-channel-dynamic-features-5",
    "fp8-block-None-1",
    "gptq-4bit-g128-None-1",
    "gptq-4bit-g32-asym-act-order-None-1",
    "gptq-v2-4bit-g64-asym-None-1",
)
@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "splits", "tokens"),
    pairwise(sorted(LAYERS), [None, "experts", "features"], [1, 5, 40]),
    ids=str,
)
def test_experts_of_other_tools(kernels, device, name, splits, tokens):
    if splits == "features" and name in UNEVEN:
        pytest.skip("a rank has no multiple of 128 features")
    folder = QUANTIZED / name
    weights = weights_of(folder)
    hidden = weights["model.layers.0.mlp.down_proj"].shape[0]
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden).bfloat16().to(device)
    ids = torch.randint(2, (tokens, 1)).int().repeat(1, 2)
    ids[:, 1] = 1 - ids[:, 0]
    ids[0, 1] = -1
    shares = torch.rand(tokens, 2).to(device)
    total = torch.zeros(tokens, hidden, dtype=torch.float64)
    for rank in range(1 if splits is None else 2):
        group = Group(rank, 1 if splits is None else 2)
        with parallel(group, splits_experts=splits != "experts"):
            experts = make(folder, kernels, device)
            total += experts(x, ids.to(device), shares).double().cpu()
    assert isinstance(experts.up, StackableWeight)
    assert type(experts.up).__name__ == LAYERS[name]
    expected = torch.zeros_like(total)
    for token in range(tokens):
        row = x[token].double().cpu()
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            if expert >= 0:
                gate, up, down = (weights[f"model.layers.{expert}.mlp.{part}"] for part in PARTS)
                expected[token] += share * (down @ (F.silu(gate @ row) * (up @ row)))
    tolerance = 0.06 if "fp8" in name and tokens > 16 else 0.01
    assert (total - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_are_known_before_loading(kernels, device, name):
    """The sizes are those that `--dry-run` computes from the layouts in the checkpoint."""
    folder = QUANTIZED / name
    config = json.loads((folder / "config.json").read_text())
    packings = read_packings(config, {one.name: one for one in stored_tensors(folder)})
    hidden, size = config["hidden_size"], config["intermediate_size"]
    with parallel(Group(0, 1)):
        experts = make(folder, kernels, device)
    for weight, sources, shape in (
        (experts.up, [source for one in SOURCES for source in (one.gate, one.up)], (size, hidden)),
        (experts.down, [one.down for one in SOURCES], (hidden, size)),
    ):
        layouts = {packings.find(source.name).layout for source in sources}
        layout = of_experts(layouts, shape[:1], shape[1], in_float32=False)
        each = layout.nbytes(*shape, 2, on_gpu=True)
        assert weight.nbytes == len(sources) * each
