"""Decoders with delta nets in GGUF files: heads in another order, sizes, ranks, and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import generate
from tests.gguf_writer import plain, q8_0, write
from tests.models import gguf_models
from tests.models.architectures import ARCHITECTURES
from tests.models.test_gguf_models import load, tensors
from toolkit import LLM
from toolkit.distributed import Shard, full_shard
from toolkit.errors import CheckpointError
from toolkit.gguf.config import HeadsInTurn
from toolkit.inventory.checkpoint import read_folder
from toolkit.kernels.switch import only_pytorch
from toolkit.weights.gguf.decode import dequantize
from toolkit.weights.gguf.packing import GGUFPacking

pytestmark = pytest.mark.usefixtures("forked_processes")

SIZES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MODELS = {
    "qwen3-next": ("qwen3next", EXPERTS | {"mlp_only_layers": []}),
    "qwen3.5": ("qwen35", {"intermediate_size": 64}),
    "qwen3.5-moe": ("qwen35moe", EXPERTS),
}
PROMPTS = [[5, 6, 7, 100, 32], [9, 8]]


def exact_in_q8_0(tensor: torch.Tensor) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(q8_0(tensor).data), dtype=torch.uint8)
    rows = raw.view(-1, tensor.shape[-1] // 32 * 34)
    return dequantize("Q8_0", rows, tensor.shape[-1]).view(tensor.shape)


@pytest.fixture(scope="module")
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.nn.Module]:
    """A file in Q8_0, and the model, whose matrices are exact in it."""
    architecture, changes = MODELS[request.param]
    family, settings = ARCHITECTURES[request.param]
    model = checkpoints.make_model(family, settings | SIZES | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.shape[-1] % 32 == 0 and parameter.dim() > 1 and "mlp.gate." not in name:
                parameter.copy_(exact_in_q8_0(parameter))
    path = tmp_path_factory.mktemp("hybrid") / "m.gguf"
    return gguf_models.write_model(path, model, architecture, quantized=True), model


@pytest.mark.parametrize(
    ("quantized", "ranks"),
    [("qwen3-next", 1), ("qwen3.5", 1), ("qwen3.5", 2), ("qwen3.5-moe", 1)],
    indirect=["quantized"],
)
def test_quantized_hybrid_answers_as_the_original(quantized, ranks):
    file, model = quantized
    with only_pytorch("dequantized"):  # the kernels round x to 8 bits
        options = {"num_threads": 1, "tensor_parallel_size": ranks}
        llm = LLM(str(file), device="cpu", dtype="float32", **options)
        found = generate(llm, PROMPTS, max_tokens=6)
        llm.shutdown()
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, 6)
    described = read_folder(file, "m").description
    assert sum(one.size for one in described.parameters()) == model.num_parameters()


def test_inputs_in_one_tensor_are_those_of_old_files(tmp_path):
    """Files of Qwen3-Next from before inputs were split have `ssm_in`, as the checkpoint."""
    family, settings = ARCHITECTURES["qwen3-next"]
    model = checkpoints.make_model(family, settings | {"mlp_only_layers": []})
    checkpoints.save(model, tmp_path / "folder", tokenizer=False)
    weights = gguf_models.tensors_of(model, "qwen3next")
    stored = {
        name: plain(tensor)
        for name, tensor in weights.items()
        if not name.endswith(("attn_qkv.weight", "attn_gate.weight"))
    }
    original = model.state_dict()
    for index in (0, 2):
        qkvz = original[f"model.layers.{index}.linear_attn.in_proj_qkvz.weight"]
        stored[f"blk.{index}.ssm_in.weight"] = plain(qkvz)
    file = write(tmp_path / "m.gguf", gguf_models.metadata_of(model, "qwen3next"), stored)
    expected = dict(tensors(load(tmp_path / "folder")[0]))
    for key, tensor in tensors(load(file)[0]):
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-6, msg=key)


def test_layers_that_draft_are_not_read(tmp_path):
    """Files of Qwen3.5 have them after the others, and count them."""
    model = checkpoints.make_model(*ARCHITECTURES["qwen3.5"])
    checkpoints.save(model, tmp_path / "folder", tokenizer=False)
    weights = gguf_models.tensors_of(model, "qwen35")
    drafting = {
        name.replace("blk.3.", "blk.4."): tensor
        for name, tensor in weights.items()
        if name.startswith("blk.3.")
    }
    drafting |= {"blk.4.nextn.eh_proj.weight": torch.ones(64, 128)}
    changes = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    layers = {"qwen35.attention.recurrent_layers": [True, False, True, False, False]}
    metadata = gguf_models.metadata_of(model, "qwen35") | changes | layers
    stored = {name: plain(tensor) for name, tensor in (weights | drafting).items()}
    file = write(tmp_path / "m.gguf", metadata, stored)
    expected = dict(tensors(load(tmp_path / "folder")[0]))
    for key, tensor in tensors(load(file)[0]):
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("columns", [Shard(512, 0, 512), Shard(512, 256, 256)], ids=str)
@pytest.mark.parametrize(("kind", "num_bytes"), [("Q4_K", 144), ("Q6_K", 210), ("Q4_0", 144)])
def test_columns_of_heads_are_in_the_original_order(kind, num_bytes, columns):
    """Blocks of 256 columns have those of two heads of 128, which are not of one group."""
    torch.manual_seed(0)
    raw = torch.randint(100, (3, 2 * num_bytes)).byte()
    packing = GGUFPacking(kind, HeadsInTurn(0, 2, 2, 128, dim=1))
    rows = full_shard(3)
    stored = packing.parts(rows, columns)["weight"].region
    assert stored == (rows, full_shard(512))
    found = packing.decode({"weight": raw}, rows, columns).dequantize()
    heads = dequantize(kind, raw, 512).view(3, 4, 128)[:, [0, 2, 1, 3]].flatten(1)
    expected = heads[:, columns.begin : columns.begin + columns.count]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"qwen35.ssm.group_count": 3}, "4 value heads of 3 groups"),
        ({"qwen35.ssm.group_count": None}, "no metadata qwen35.ssm.group_count"),
        ({"qwen35.ssm.inner_size": 2**30}, r"it has \[160, 64\]"),
        ({"qwen35.ssm.state_size": 2**20}, "attn_qkv.weight"),
        ({"qwen35.ssm.conv_kernel": 2**20}, r"blk.0.ssm_conv1d.weight .*, and it has \[160, 3\]"),
        ({"qwen35.attention.head_count": 2**20}, "blk.1.attn_q.weight"),
    ],
)
def test_wrong_sizes_of_delta_nets_are_one_clear_error(tmp_path, metadata, message):
    model = checkpoints.make_model(*ARCHITECTURES["qwen3.5"])
    given = gguf_models.metadata_of(model, "qwen35") | metadata
    given = {key: value for key, value in given.items() if value is not None}
    weights = gguf_models.tensors_of(model, "qwen35").items()
    file = write(tmp_path / "m.gguf", given, {name: plain(tensor) for name, tensor in weights})
    with pytest.raises(CheckpointError, match=message):
        LLM(str(file), device="cpu")


def test_heads_that_cut_groups_of_a_quantized_tensor_are_an_error(tmp_path):
    """Heads of 24 columns, which llama.cpp does not multiply either, cut blocks of 32."""
    model = checkpoints.make_model(*ARCHITECTURES["qwen3.5"])
    file = gguf_models.write_model(tmp_path / "m.gguf", model, "qwen35", quantized=True)
    with pytest.raises(CheckpointError, match=r"out_proj .*the order of its columns cuts groups"):
        LLM(str(file), device="cpu")
