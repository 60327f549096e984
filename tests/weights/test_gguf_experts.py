"""Mixtures of experts in GGUF files: stacked tensors, wrong sizes, ranks, and answers."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import generate
from tests.gguf_writer import Stored, plain, q8_0, write
from tests.models import gguf_models
from tests.models.architectures import ARCHITECTURES
from toolkit import LLM
from toolkit.config import EngineConfig
from toolkit.distributed import Shard, full_shard
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import Device, find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate
from toolkit.kernels.switch import only_pytorch
from toolkit.weights.gguf.decode import dequantize
from toolkit.weights.gguf.reader import read_header, slot_of
from toolkit.weights.loading.safetensors import read_mapped
from toolkit.weights.slots import Slot

pytestmark = pytest.mark.usefixtures("forked_processes")

BLOCKS = json.loads((Path(__file__).parent / "gguf_blocks.json").read_text())
EXPERTS, CHOSEN, SIZE, HIDDEN, LAYERS = 24, 4, 64, 64, 3
SETTINGS = ARCHITECTURES["qwen3-moe"][1] | {"mlp_only_layers": [], "moe_intermediate_size": SIZE}
PROMPTS = [[5, 6, 7, 100, 32], [9, 8]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A model whose matrices are exact in Q8_0."""
    found = checkpoints.make_model("Qwen3Moe", SETTINGS)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if parameter.dim() >= 2 and "mlp.gate." not in name:
                raw = torch.frombuffer(bytearray(q8_0(parameter).data), dtype=torch.uint8)
                rows = raw.view(-1, parameter.shape[-1] // 32 * 34)
                decoded = dequantize("Q8_0", rows, parameter.shape[-1])
                parameter.copy_(decoded.view(parameter.shape))
    return found


@pytest.fixture(scope="module")
def file(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "m.gguf"
    return gguf_models.write_model(path, model, "qwen3moe", quantized=True)


ONE, FEATURES, EXPERTS_OF_ALL = (
    {},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
)
"""Settings for one device, and for two with half of the features of all experts, or half of the
experts."""


@pytest.mark.parametrize("settings", [ONE, FEATURES, EXPERTS_OF_ALL])
def test_quantized_experts_answer_as_the_original(file, model, settings):
    check_answers(file, model, settings)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A gpt-oss whose experts are in MXFP4, with biases, and the dequantized model."""
    sizes = {"intermediate_size": SIZE, "num_hidden_layers": 2}
    model = checkpoints.make_model("GptOss", ARCHITECTURES["gpt-oss"][1] | sizes)
    stored = {}
    for name, tensor in gguf_models.tensors_of(model, "gpt-oss").items():
        stored[name] = plain(tensor)
        if name.endswith("_exps.weight"):
            blocks = torch.randint(256, (tensor.numel() // 32, 17)).byte()
            blocks[:, 0] = torch.randint(122, 125, (len(blocks),))
            stored[name] = Stored("MXFP4", tuple(tensor.shape), blocks.numpy().tobytes())
            tensor.copy_(dequantize("MXFP4", blocks, 32).view(tensor.shape))  # into the model
    path = tmp_path_factory.mktemp("mxfp4") / "m.gguf"
    return write(path, gguf_models.metadata_of(model, "gpt-oss"), stored), model


@pytest.mark.parametrize("settings", [ONE, EXPERTS_OF_ALL])
def test_experts_in_mxfp4_answer_as_the_original(mxfp4, settings):
    check_answers(*mxfp4, settings)


def test_estimate_of_mxfp4_counts_bits_of_the_device(mxfp4):
    """4.25 on a GPU, where rows have multiples of 128 columns; 8.5 on a CPU."""
    config = EngineConfig.from_settings({"dtype": "bfloat16"})
    found = read_folder(mxfp4[0], "m")
    gpu, cpu = (
        estimate(found, config, Device(kind, kind, 2**34, 2**34)).weights
        for kind in ("cuda", "cpu")
    )
    rows = 2 * ARCHITECTURES["gpt-oss"][1]["num_local_experts"] * (2 * SIZE + HIDDEN)
    assert cpu - gpu == rows * (SIZE + SIZE // 16 - 128 * 17 // 32)


def check_answers(file: Path, model: torch.nn.Module, settings: dict[str, object]) -> None:
    with only_pytorch("dequantized"):  # the kernels round x to 8 bits
        llm = LLM(str(file), device="cpu", dtype="float32", num_threads=1, **settings)
        found = generate(llm, PROMPTS, max_tokens=6)
        llm.shutdown()
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, 6)


def test_estimate_has_active_parameters_and_exact_bytes(file):
    found = read_folder(file, "m")
    expert, expert_layers = 3 * SIZE * HIDDEN, LAYERS * EXPERTS
    names = [one for one in found.tensors if ".experts." in one.name]
    assert (len(names), sum(one.size for one in names)) == (
        3 * expert_layers,
        expert_layers * expert,
    )
    assert found.num_parameters - found.num_active == LAYERS * (EXPERTS - CHOSEN) * expert
    matrices = expert_layers * expert + 2 * 262 * HIDDEN + LAYERS * 3 * HIDDEN * 128
    assert found.type_bytes["Q8_0"] == matrices * 34 // 32
    config = EngineConfig.from_settings({"device": "cpu", "max_num_seqs": 2})
    cpu = estimate(found, config, find_device("cpu"))
    assert cpu.num_parameters == found.num_parameters
    assert cpu.weights < 1.2 * sum(found.type_bytes.values())


def test_parts_of_each_expert_of_a_stack_are_read(tmp_path):
    raw = base64.b64decode(BLOCKS["types"]["Q4_K"]["raw"])
    values = base64.b64decode(BLOCKS["types"]["Q4_K"]["values"])
    rows, columns = BLOCKS["rows"] // 2, BLOCKS["columns"]
    expected = torch.frombuffer(bytearray(values), dtype=torch.float32).view(2, rows, columns)
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 2}
    stack = Stored("Q4_K", (2, rows, columns), raw)
    file = write(tmp_path / "m.gguf", metadata, {"blk.1.ffn_up_exps.weight": stack})
    found = {tensor.name: tensor for tensor in read_header(file)}
    assert len(found) == 2
    for expert, each in enumerate(expected):
        tensor = found[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        assert (tensor.kind, tensor.shape) == ("Q4_K", (rows, columns))
        for part in (full_shard(columns), Shard(columns, 40, 100)):
            target = torch.zeros(rows, part.count)
            read = tensor.part((full_shard(rows), part))
            read_mapped([(read, slot_of(read, Slot(target)))])
            torch.testing.assert_close(target, each[:, part.entries], rtol=0, atol=0)


def test_layers_that_only_draft_are_not_read(tmp_path):
    model = checkpoints.make_model(*ARCHITECTURES["glm4-moe"])
    tensors = gguf_models.tensors_of(model, "glm4moe")
    drafting = {
        name.replace("blk.1.", "blk.2."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blk.1.")
    }
    drafting["blk.2.nextn.eh_proj.weight"] = torch.zeros(64, 128)
    more = {"glm4moe__block_count": 3, "glm4moe__nextn_predict_layers": 1}
    file = gguf_models.write_model(tmp_path / "m.gguf", model, "glm4moe", extra=drafting, **more)
    assert not any(tensor.name.startswith("model.layers.2.") for tensor in read_header(file))
    llm = LLM(str(file), device="cpu", dtype="float32", num_threads=1)
    (found,) = generate(llm, PROMPTS[:1], max_tokens=8)
    llm.shutdown()
    assert list(found.outputs[0].token_ids) == checkpoints.greedy(model, PROMPTS[0], 8)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 10**9}, "1000000000 experts, 4 for each token"),
        ({"expert_count": 23}, r"ffn_gate_inp.weight the shape \[23, 64\], and it has \[24, 64\]"),
        ({"expert_count": 0}, "which is not a size"),
        ({"expert_count": "many"}, "which is not a size"),
        ({"expert_used_count": 25}, "24 experts, 25 for each token"),
        ({"expert_used_count": 0}, "which is not a size"),
        ({"expert_used_count": None}, "no metadata qwen3moe.expert_used_count"),
        ({"expert_feed_forward_length": None}, "no metadata qwen3moe.expert_feed_forward_length"),
        ({"expert_feed_forward_length": 2**30}, r"it has \[24, 64, 64\]"),
        ({"expert_gating_func": 2}, "has qwen3moe.expert_gating_func: 2, which tk does not know"),
        ({"leading_dense_block_count": 1}, "leading_dense_block_count: 1, which tk does not know"),
        ({"expert_shared_count": 1}, "expert_shared_count: 1, which tk does not know"),
        ({"nextn_predict_layers": 3}, "3 layers, 3 of which only draft"),
        ({"nextn_predict_layers": 2**31}, "which is not a number"),
        ({"nextn_predict_layers": 1, "block_count": 5}, "block_count 5, and tensors of 3 layers"),
    ],
    ids=str,
)
def test_wrong_numbers_of_experts_are_one_clear_error(tmp_path, model, metadata, message):
    given = {f"qwen3moe.{key}": value for key, value in metadata.items()}
    file = rewritten(tmp_path, model, "qwen3moe", given)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(str(file), device="cpu")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"leading_dense_block_count": 0}, "has no tensor blk.0.ffn_gate_inp.weight"),
        ({"leading_dense_block_count": 2**20}, "has no tensor blk.1.ffn_down.weight"),
        ({"expert_shared_count": 2**20}, r"ffn_gate_shexp.weight the shape \[16777216, 64\]"),
        ({"expert_gating_func": 1}, "expert_gating_func: 1, which tk does not know"),
    ],
    ids=str,
)
def test_wrong_layers_of_experts_are_one_clear_error(tmp_path, metadata, message):
    model = checkpoints.make_model(*ARCHITECTURES["glm4-moe"])
    given = {f"glm4moe.{key}": value for key, value in metadata.items()}
    file = rewritten(tmp_path, model, "glm4moe", given)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(str(file), device="cpu")


def rewritten(
    folder: Path, model: torch.nn.Module, architecture: str, metadata: dict[str, object]
) -> Path:
    """Write a model's file with other metadata. None: without that entry."""
    given = gguf_models.metadata_of(model, architecture) | metadata
    given = {key: value for key, value in given.items() if value is not None}
    tensors = gguf_models.tensors_of(model, architecture)
    return write(
        folder / "m.gguf", given, {name: plain(tensor) for name, tensor in tensors.items()}
    )
