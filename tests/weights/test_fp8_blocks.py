"""Weights in FP8 with a scale for each block: products on both devices, loading, dequantizing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.distributed import Group, parallel
from toolkit.kernels import reference
from toolkit.kernels.switch import only_pytorch
from toolkit.kernels.table import TritonKernels
from toolkit.layers import Linear, OutputHead
from toolkit.models.build import build_model, load_config
from toolkit.models.model import Model
from toolkit.weights import quantization
from toolkit.weights.groups import Blocks
from toolkit.weights.kinds import blocks, fp8
from toolkit.weights.kinds.blocks import BlockWeight
from toolkit.weights.kinds.plain import PlainWeight
from toolkit.weights.layout import DENSE, Kind, Layout
from toolkit.weights.loading.loader import load_weights
from toolkit.weights.weight import Epilogue

if TYPE_CHECKING:
    import transformers

ROWS, COLUMNS = 256, 200
LAYOUT = Layout(Kind.FP8, 8, 128, 128)
GPU = torch.device("cuda")


@pytest.fixture
def half():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(default)


@pytest.fixture
def interpreted(triton_runs: bool, half, monkeypatch) -> None:
    """Build weights for Triton's kernels, in its interpreter if there is no GPU."""
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    if not torch.cuda.is_available():
        kernels = TritonKernels()
        monkeypatch.setattr(blocks, "triton_kernels_for", lambda device: kernels)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stored(columns: int = COLUMNS) -> Blocks:
    """Return a random weight as a checkpoint stores it."""
    torch.manual_seed(0)
    values = torch.randn(ROWS, columns, dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = torch.rand(2, -(-columns // 128), dtype=torch.float32) + 0.1
    return Blocks(values, scales, (128, 128))


def filled(decoded: Blocks, device: torch.device | None = None) -> BlockWeight:
    """Return a weight that was written in two parts."""
    with device or torch.device("cpu"):
        weight = BlockWeight(*decoded.values.shape)
    for row in (0, 1):
        part = slice(row * 128, row * 128 + 128)
        own = Blocks(decoded.values[part], decoded.scales[row : row + 1], decoded.block)
        weight.write(part, own)
    return weight


def save_in_blocks(model: transformers.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model with random blocks of FP8 as its linear layers. Return these in fp32."""
    model.save_pretrained(folder)
    tensors, dense = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = (-(-size // 128) for size in weight.shape)
            scales = torch.rand(rows, columns) + 0.1
            tensors[name] = values = torch.randn(weight.shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            own = values.float() * each[: weight.shape[0], : weight.shape[1]]
            dense[name.removesuffix(".weight")] = own
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return dense


def load(folder: Path) -> Model:
    """Return this rank's part of the model."""
    config, device = load_config(folder), torch.device("cpu")
    model = build_model(config, device=device, dtype=torch.bfloat16, max_model_len=64)
    load_weights(model, folder, "auto")
    return model


def linears(model: Model) -> list[Linear]:
    """Return the linear layers without the output head."""
    found = [module for module in model.modules() if isinstance(module, Linear)]
    return [one for one in found if not isinstance(one, OutputHead)]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_weight_has_the_numbers_that_were_written():
    decoded = stored()
    weight, dense = filled(decoded), decoded.dequantize()
    assert torch.equal(weight.dequantize(), dense)
    assert torch.equal(weight.dequantize(slice(100, 150)), dense[100:150])
    ids = torch.tensor([255, 0, 127, 128, 5])
    assert torch.equal(weight.take(ids), dense[ids])
    assert weight.nbytes == LAYOUT.nbytes(ROWS, COLUMNS, 2, on_gpu=True)


def test_blocks_of_rows_are_multiplied():
    weight = filled(stored())
    expected = weight.dequantize()
    weight.multiply(0.25, slice(128, 256))
    expected[128:] *= 0.25
    assert torch.equal(weight.dequantize(), expected)
    with pytest.raises(ValueError, match="no multiple of a block"):
        weight.multiply(2.0, slice(0, 100))


def test_random_weights_have_the_usual_spread():
    weight = BlockWeight(ROWS, COLUMNS)
    weight.fill_randomly(torch.Generator().manual_seed(0))
    assert 0.015 < weight.dequantize().std().item() < 0.025


@pytest.mark.on_cpu("1-200", "5-256", "40-200")
@pytest.mark.parametrize("columns", [256, 200])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.usefixtures("interpreted")
def test_kernels_compute_the_product_with_the_dense_weight(device, tokens, columns):
    decoded = stored(columns)
    weight = filled(decoded, device)
    assert weight.adds_deltas
    x = torch.randn(tokens, columns).to(device)
    bias = torch.randn(ROWS).to(device)
    y = weight.product(x, Epilogue(bias, "silu", gated=True))
    dense = decoded.dequantize().to(device)
    expected = reference.linear(x.float(), dense, bias.float(), "silu", gated=True)
    assert y.dtype == torch.bfloat16
    is_rounded = tokens > 16 and columns % 16 == 0
    assert relative(y, expected) < (0.09 if is_rounded else 0.01)


def test_pytorch_computes_products_in_float32():
    decoded = stored()
    weight, x = filled(decoded), torch.randn(20, COLUMNS)
    assert not weight.adds_deltas
    y = weight.product(x, Epilogue(dtype=torch.float64))
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, (x @ decoded.dequantize().T).double())


@pytest.mark.usefixtures("half")
def test_reference_rounds_rows_as_kernels_do():
    decoded, x = stored(), torch.randn(20, COLUMNS)
    with only_pytorch("reference"):
        rounded = filled(decoded).product(x, Epilogue())
    dense = decoded.dequantize()
    assert 0.01 < relative(rounded, x.float() @ dense.T) < 0.05
    assert relative(rounded, reference.round_to_fp8(x) @ dense.T) < 0.004


def test_ranks_merge_their_complete_blocks(tmp_path, monkeypatch):
    """Query, key and value are one weight, gate and up another; down is split by columns."""

    import transformers

    monkeypatch.setattr(fp8, "has_arithmetic", lambda device: True)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=100)
    expected = save_in_blocks(transformers.LlamaForCausalLM(config), tmp_path)
    found = dict.fromkeys(expected, 0)
    for rank in range(2):
        with parallel(Group(rank, 2)), only_pytorch("reference"):
            for linear in linears(load(tmp_path)):
                assert isinstance(linear.weight, BlockWeight)
                ends = itertools.accumulate(part.count for part in linear.parts)
                for source, rows, end in zip(linear.sources, linear.parts, ends, strict=True):
                    own = linear.weight.dequantize(slice(end - rows.count, end))
                    part = expected[source.name][rows.entries, linear.columns.entries]
                    assert torch.equal(own, part), source.name
                    found[source.name] += own.numel()
    assert found == {name: weight.numel() for name, weight in expected.items()}


@pytest.mark.parametrize("key_size", [128, 64])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_delta_nets_have_their_rows_of_blocks(tmp_path, monkeypatch, num_ranks, key_size):
    """One tensor has queries, keys, values and gates, head by head, as Qwen3-Next's in FP8.

    Keys of 64 cut blocks. Such weights are expanded."""
    import transformers

    monkeypatch.setattr(fp8, "has_arithmetic", lambda device: True)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_experts": 0, "vocab_size": 100}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 128}
    config = transformers.Qwen3NextConfig(
        **sizes,
        **heads,
        linear_key_head_dim=key_size,
        layer_types=["linear_attention"],
        intermediate_size=256,
    )
    save_in_blocks(transformers.Qwen3NextForCausalLM(config), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    net = "model.layers.0.linear_attn."
    values = torch.randn(tensors[f"{net}in_proj_qkvz.weight"].shape).to(torch.float8_e4m3fn)
    scales = torch.rand(len(values) // 128, 2) + 0.1
    tensors[f"{net}in_proj_qkvz.weight"] = values
    tensors[f"{net}in_proj_qkvz.weight_scale_inv"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"]["modules_to_not_convert"] = [f"{net}in_proj_ba"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    dense = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    heads = dense.view(2, -1, 256).split((key_size, key_size, 256, 256), 1)
    for rank in range(num_ranks):
        with parallel(Group(rank, num_ranks)), only_pytorch("reference"):
            (linear,) = (
                one for one in linears(load(tmp_path)) if "in_proj_qkvz" in one.sources[0].name
            )
        expected = torch.cat([one.chunk(num_ranks)[rank].flatten(0, 1) for one in heads])
        found = linear.weight.dequantize(slice(0, len(expected)))
        torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)
        kinds = [type(one) for one in linear.weight.weights]
        assert (kinds == [BlockWeight, PlainWeight]) == (key_size == 128)


@pytest.mark.parametrize("layout", [LAYOUT, Layout(Kind.FP8, 8)], ids=str)
def test_gpus_with_fp8_keep_the_layout(layout, monkeypatch):
    monkeypatch.setattr(fp8, "has_arithmetic", lambda device: device == GPU)
    monkeypatch.setattr(quantization, "triton_kernels_for", lambda device: SimpleNamespace())
    assert quantization.usable(layout, GPU) == layout
    assert quantization.usable(layout, torch.device("cpu")) == DENSE
    with only_pytorch("reference"):
        assert quantization.usable(layout, GPU) == layout
    with only_pytorch("dequantized"):
        assert quantization.usable(layout, GPU) == DENSE
    monkeypatch.setattr(quantization, "triton_kernels_for", lambda device: None)
    assert quantization.usable(layout, GPU) == DENSE
