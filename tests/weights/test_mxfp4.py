"""gpt-oss checkpoints in MXFP4, against Transformers' own dequantization."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import checkpoints
from tests.checkpoints import generate
from toolkit import LLM
from toolkit.config import EngineConfig
from toolkit.distributed import Group, expert_shards, parallel
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import Device
from toolkit.inventory.card import show
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate
from toolkit.kernels import mxfp4, reference
from toolkit.kernels.gates import ClampedSwiGLU
from toolkit.kernels.switch import only_pytorch
from toolkit.layers import Projections, StackedExperts
from toolkit.models.architectures.gpt_oss import Config, describe
from toolkit.models.describe import Experts
from toolkit.verify import transformers_model
from toolkit.verify.prompts import Question
from toolkit.weights.formats import read_packings
from toolkit.weights.gguf.decode import decode
from toolkit.weights.groups import Groups
from toolkit.weights.quantization import quantized

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS, HIDDEN, SIZE = 6, 64, 192


def quantized_experts(count: int, hidden: int, size: int) -> dict[str, Tensor]:
    """Return the tensors of a layer's experts, by the ends of their names. Biases have no part."""
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
        groups = columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (count, rows, groups, 16)).byte()
        tensors[f"{name}_scales"] = torch.randint(122, 125, (count, rows, groups)).byte()
    return tensors


def dequantized(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return [experts, in, out] in fp32, by Transformers."""

    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = (tensors[f"{name}_{part}"] for part in ("blocks", "scales"))
    wide: Tensor = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)
    return wide.float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint in MXFP4, and its dequantized one in the folder `plain`."""
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": SIZE, "num_local_experts": EXPERTS}
    settings = checkpoints.ARCHITECTURES["gpt-oss"][1] | sizes
    model = checkpoints.make_model("GptOss", settings)
    found = checkpoints.save(model, tmp_path_factory.mktemp("mxfp4"))
    plain = checkpoints.save(model, found / "plain")
    tensors = load_file(found / "model.safetensors")
    wide = dict(tensors)
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        ours = quantized_experts(EXPERTS, HIDDEN, SIZE)
        for name in ("gate_up_proj", "down_proj"):
            wide[f"{prefix}.{name}"] = dequantized(ours, name)
            del tensors[f"{prefix}.{name}"]
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in ours.items()}
    save_file(tensors, found / "model.safetensors", metadata={"format": "pt"})
    save_file(wide, plain / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_json(found / "config.json", quantization_config=QUANTIZATION)
    return found


@pytest.mark.parametrize("has_kernels", [False, True])
def test_checkpoint_equals_the_dequantized_model(folder, has_kernels):
    """CPU kernels round what they multiply to 8 bits, too."""

    from transformers import GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(folder / "plain", attn_implementation="eager").eval()
    prompts = [[5, 6, 7, 100, 32], [9, 8], list(range(40, 70))]
    with nullcontext() if has_kernels else only_pytorch("dequantized"):
        llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=160)
        ours = [checkpoints.engine_logits(llm, prompt) for prompt in prompts]
        found = generate(llm, prompts, max_tokens=12)
        llm.shutdown()
    tolerance = 0.1 if has_kernels else 1e-5
    for prompt, logits, result in zip(prompts, ours, found, strict=True):
        expected = checkpoints.logits(model, prompt)
        assert (logits - expected).norm() <= tolerance * expected.norm()
        if not has_kernels:
            assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, 12)


@pytest.mark.parametrize(
    ("kind", "layout"), [("cpu", "int8 in groups of 32 (mxfp4)"), ("cuda", "MXFP4 (mxfp4)")]
)
def test_show_names_the_layout_of_this_machine(folder, monkeypatch, capsys, kind, layout):
    device = Device(kind, kind, 2**36, 2**36)
    monkeypatch.setattr("toolkit.inventory.card.find_device", lambda: device)
    show(str(folder), None, as_json=False)
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "in memory" in one)
    assert line.split(maxsplit=2)[2] == layout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_on_a_gpu_equals_the_dequantized_model(folder, dtype):
    from transformers import GptOssForCausalLM

    from tests.models.conftest import Case
    from tests.models.test_parity_gpu import SIZES, Noise

    model = GptOssForCausalLM.from_pretrained(folder / "plain", attn_implementation="eager").eval()
    case = Case("gpt-oss", folder, model)
    llm = case.engine(device="cuda", dtype=dtype, max_model_len=160, **SIZES)
    case.assert_greedy(generate(llm, case.prompts), Noise(case).tolerance(dtype))
    llm.shutdown()


def test_verify_compares_with_the_dequantized_model(folder):
    from transformers import GptOssForCausalLM

    tokens = [5, 6, 7, 100, 32]
    plain = GptOssForCausalLM.from_pretrained(folder / "plain", attn_implementation="eager").eval()
    chances = checkpoints.logits(plain, tokens).log_softmax(-1)
    config = EngineConfig.from_settings({"model": str(folder)})
    (found,) = transformers_model.score(folder, config, 1, [Question(tokens)], 20)
    for position, likeliest in found.chances.items():
        expected = {token: float(chances[position - 1, token]) for token in likeliest}
        assert likeliest == pytest.approx(expected, abs=1e-4)


def test_scales_are_read_bit_for_bit():
    """Every number with every scale that is supported, as a GPU and as a CPU has them."""

    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(mxfp4.MAX_SCALE + 1).byte()[None, :, None]
    blocks = (torch.arange(16) + 16 * torch.arange(15, -1, -1)).byte()
    tensors = {"one_blocks": blocks.expand(1, scales.shape[1], 1, 16), "one_scales": scales}
    wide = convert_moe_packed_tensors(tensors["one_blocks"], scales, dtype=torch.float32)[0].T
    padded = torch.zeros(2, scales.shape[1], 4, 16, dtype=torch.uint8)
    padded[0, :, :1] = blocks
    padded[1, :, 0, :1] = scales[0]
    words, exponents = padded[0].clone(), padded[1, :, :, 0].clone()
    mxfp4.arrange_(words, exponents)
    exponents = exponents.view(-1).view(torch.int32).view(1, -1)
    found = mxfp4.dequantize(words.view(-1).view(torch.int16).view(1, -1, 32), exponents)
    assert torch.equal(found[:, :32], wide)


def test_numbers_and_scales_of_gguf_are_encoded_bit_for_bit():
    blocks = torch.randint(256, (256, 17)).byte()
    blocks[:, 0] = torch.arange(256)
    groups = decode("MXFP4", blocks[:255], 32)
    assert isinstance(groups, Groups)
    numbers, scales = mxfp4.encode(groups.values, groups.scales)
    assert torch.equal(scales[:, 0], blocks[:255, 0])
    stored = torch.cat((blocks[:255, 1:] & 15, blocks[:255, 1:] >> 4), 1)
    assert torch.equal(numbers, torch.where(stored == 8, 0, stored))  # 8: -0


def make_rank(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> StackedExperts:
    """Return this rank's experts of a layer, filled."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": SIZE, "num_local_experts": EXPERTS}
    config = Config(architectures=["GptOssForCausalLM"], num_hidden_layers=1, **sizes)
    (experts,) = [mix for mix in describe(config).mixes if isinstance(mix, Experts)]
    assert isinstance(experts, Experts)
    sources = [Projections(*experts.expert(i)) for i in range(EXPERTS)]
    packings = read_packings({"quantization_config": QUANTIZATION}, {})
    own, size = expert_shards(EXPERTS, SIZE)
    kernels = SimpleNamespace(
        layer_of_experts=lambda *layer: lambda *rows: reference.experts(*rows, *layer)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with quantized(None, packings):
            made = StackedExperts(HIDDEN, size, sources, own, ClampedSwiGLU(), kernels, bias=True)
    finally:
        torch.set_default_dtype(before)
    slots = made.slots()
    for name, tensor in tensors.items():
        slot = slots.pop(f"model.layers.0.mlp.experts.{name}")
        assert slot.shape == tensor.shape
        for part in slot.parts:
            part.fill(tensor[tuple(shard.entries for shard in part.region)])
    assert not slots
    made.arrange()
    return made


@torch.inference_mode()
@pytest.mark.parametrize("splits", [None, "experts", "features"])
def test_ranks_add_up_to_the_dequantized_experts(splits):
    torch.manual_seed(0)
    tensors = quantized_experts(EXPERTS, HIDDEN, SIZE)
    tensors |= {
        "gate_up_proj_bias": torch.randn(EXPERTS, 2 * SIZE),
        "down_proj_bias": torch.randn(EXPERTS, HIDDEN),
    }
    up, down = (dequantized(tensors, name) for name in ("gate_up_proj", "down_proj"))
    x, ids = torch.randn(5, HIDDEN), torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(5)])
    weights = torch.rand(5, 2)
    expected = torch.zeros(5, HIDDEN)
    for token in range(5):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            y = x[token] @ up[expert] + tensors["gate_up_proj_bias"][expert]
            gate, wide = y[::2].clamp(max=7), y[1::2].clamp(-7, 7)
            inner = gate * torch.sigmoid(1.702 * gate) * (wide + 1)
            expected[token] += weight * (inner @ down[expert] + tensors["down_proj_bias"][expert])
    total = torch.zeros(5, HIDDEN)
    for rank in range(1 if splits is None else 2):
        group = Group(rank, 1 if splits is None else 2)
        with parallel(group, splits_experts=splits != "experts"):
            total += make_rank(tensors)(x, ids.int(), weights)
    assert (total - expected).norm() <= 1e-5 * expected.norm()


def test_parts_that_cut_a_group_are_refused():
    tensors = quantized_experts(EXPERTS, HIDDEN, SIZE)
    group = Group(0, 4)  # 192 / 4 = 48 columns
    with parallel(group), pytest.raises(ConfigError, match="multiple of 32"):
        make_rank(tensors)


def test_fp16_is_refused():
    with pytest.raises(ConfigError, match="float16: MXFP4 needs"):
        make_rank({}, torch.float16)


def test_a_large_scale_is_an_error():
    tensors = quantized_experts(EXPERTS, HIDDEN, SIZE)
    biases = {"gate_up_proj_bias": torch.zeros(EXPERTS, 2 * SIZE)}
    tensors |= biases | {"down_proj_bias": torch.zeros(EXPERTS, HIDDEN)}
    tensors["down_proj_scales"][1, 2, 0] = 255
    with pytest.raises(CheckpointError, match=r"2 \*\* 128"):
        make_rank(tensors)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_estimate_counts_bits_of_the_device(folder, kind):
    """4.25 on a GPU, where rows have multiples of 128 columns; 8.5 on a CPU."""
    config = EngineConfig.from_settings({"model": str(folder), "dtype": "bfloat16"})
    device = Device(kind, kind, 2**34, 2**34)
    rows = 4 * EXPERTS  # of each, in all layers
    weights = rows * 3 * HIDDEN * SIZE
    found = estimate(read_folder(folder, "gpt-oss"), config, device).weights
    plain = estimate(read_folder(folder / "plain", "gpt-oss"), config, device).weights
    stored = rows * (2 * SIZE * 128 + HIDDEN * 256) * 17 // 32
    assert plain - found == 2 * weights - (stored if kind == "cuda" else weights * 17 // 16)
