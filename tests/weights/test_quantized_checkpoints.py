"""Checkpoints that other tools quantized: `tools/quantized_fixtures.py` made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import generate
from toolkit import LLM
from toolkit.config import ModelConfig
from toolkit.distributed import Group, Shard, parallel
from toolkit.errors import CheckpointError, ConfigError
from toolkit.inventory.checkpoint import read_folder
from toolkit.kernels.switch import only_pytorch
from toolkit.layers import Linear
from toolkit.models.build import build_model, load_config
from toolkit.models.model import Model
from toolkit.weights.loading.loader import load_weights

pytestmark = pytest.mark.usefixtures("forked_processes")

CHECKPOINTS = sorted(
    path.parent
    for path in Path(__file__).parent.glob("quantized/*/config.json")
    if "nvfp4" not in path.parent.name
)
VERSIONS = {"exact": 0.001, "packed": 0.3}
"""Differences of two logits that rounding may turn around: of fp32, and of x to 8 bits."""
each = pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)


def load(folder: Path) -> Model:
    """Return this rank's part of the model, in fp32."""
    config = load_config(folder)
    model = build_model(config, device=torch.device("cpu"), dtype=torch.float32, max_model_len=64)
    load_weights(model, folder, "auto")
    return model


def dequantized(model: Model) -> dict[str, tuple[Shard, Shard, torch.Tensor]]:
    """Return the projections' (rows, columns, weight in fp32) by name."""
    weights = {}
    for module in model.modules():
        if isinstance(module, Linear):
            first = 0
            for source, part in zip(module.sources, module.parts, strict=True):
                weight = module.weight.dequantize(slice(first, first + part.count))
                weights[source.name] = part, module.columns, weight
                first += part.count
    return weights


@each
def test_weights_equal_an_independent_reader_bit_for_bit(folder):
    expected = json.loads((folder / "expected.json").read_text())["weights"]
    weights = dequantized(load(folder))
    assert expected
    for name, one in expected.items():
        weight = weights[name][2].to(getattr(torch, one["dtype"])).float()
        assert list(weight.shape) == one["shape"]
        if folder.name == "bnb-int8":
            check_int8(folder, name, weight, one["sha256"])
            continue
        assert digest(weight) == one["sha256"], name


def check_int8(folder: Path, name: str, weight: torch.Tensor, expected: str) -> None:
    """Check weights of LLM.int8. The last bit differs: bitsandbytes divides after it multiplies."""
    stored = load_file(folder / "model.safetensors")
    exact = stored[f"{name}.weight"].float() * stored[f"{name}.SCB"][:, None] * (1 / 127)
    assert digest(exact) == expected
    torch.testing.assert_close(weight, exact, rtol=2**-22, atol=0)


def digest(weight: torch.Tensor) -> str:
    """Return the digest in the files, in which zero has no sign."""
    return hashlib.sha256((weight + 0.0).contiguous().numpy().tobytes()).hexdigest()


CUT = {
    "autoround-export-awq",
    "autoround-gptq-mixed",
    "ct-w4a16-g128",
    "ct-w8a16-channel",
    "gptq-4bit-g128",
}
"""Checkpoints with groups of 128 columns where a rank has 64."""


@each
def test_ranks_have_their_parts_of_the_weights(folder):
    expected = dequantized(load(folder))
    for rank in range(2):
        with parallel(Group(rank, 2)):
            if "block" in folder.name or folder.name in CUT:
                with pytest.raises(ConfigError, match="--tensor-parallel-size"):
                    load(folder)
                return
            parts = dequantized(load(folder))
        for name, (rows, columns, weight) in parts.items():
            assert torch.equal(weight, expected[name][2][rows.entries, columns.entries]), name


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ct-mixed", {"tensor_parallel_size": 2}), ("gptq-dynamic", {"pipeline_parallel_size": 2})],
)
def test_ranks_and_stages_give_the_same_tokens(name, ranks):
    folder = str(Path(__file__).parent / "quantized" / name)
    prompt = [[5, 17, 99, 3, 60, 7]]
    tokens = []
    for settings in ({}, ranks):
        llm = LLM(folder, dtype="float32", max_model_len=64, **settings)
        tokens.append(generate(llm, prompt, max_tokens=8)[0].outputs[0].token_ids)
        llm.shutdown()
    assert tokens[0] == tokens[1]


def changed(folder: Path, name: str, change: Callable[[dict, dict], None]) -> Path:
    """Return a copy of a checkpoint after `change`(quantization_config, tensors)."""
    original = Path(__file__).parent / "quantized" / name
    config = json.loads((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq-4bit-g128", lambda c, t: c.update(group_size=64), r"qzeros has the shape \[2, 16\]"),
        ("gptq-4bit-g128", lambda c, t: c.update(bits=5), "5 bits, and tk reads 2, 3, 4 and 8"),
        ("gptq-4bit-g128", lambda c, t: c.update(bits="x"), "bits is 'x' instead of an integer"),
        ("gptq-4bit-g128", lambda c, t: t.pop(f"{Q}.scales"), f"lacks 1 of .*{Q}.scales"),
        (
            "gptq-4bit-g128",
            lambda c, t: t.update({f"{Q}.g_idx": torch.arange(128, dtype=torch.int32) % 3}),
            f"{Q} cannot be read: g_idx",
        ),
        (
            "gptq-4bit-g32-asym-act-order",
            lambda c, t: c.update(sym=True),
            "zero points differ from those of a symmetric format",
        ),
        (
            "gptq-4bit-g128",
            lambda c, t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
            "has the type F32, which is not what config.json describes: int32",
        ),
        ("gptq-4bit-g128", lambda c, t: c.update(quant_method="quip"), "quantized by quip, and tk"),
        ("gptq-4bit-g128", lambda c, t: c.update(checkpoint_format="marlin"), "'marlin', and tk"),
        (
            "autoround-export-awq",
            lambda c, t: c.update(version="gemv"),
            "'gemv', and tk",
        ),
        ("ct-w4a16-g128", lambda c, t: c.update(transform_config={"a": 1}), "transform_config"),
        (
            "ct-w4a16-g128",
            lambda c, t: c.update(sparsity_config={"format": "sparse-24"}),
            "tk does not read sparse weights",
        ),
        ("ct-w4a16-g128", lambda c, t: c.update(ignore=["re:("]), "is no regular expression"),
        (
            "ct-w4a16-g128",
            lambda c, t: c["config_groups"]["group_0"]["weights"].update(group_size=-1),
            r"weights\.group_size is -1",
        ),
        ("bnb-nf4-nested", lambda c, t: c.update(bnb_4bit_quant_type="af4"), "is 'af4', and tk"),
        (
            "bnb-nf4-nested",
            lambda c, t: c.update(llm_int8_skip_modules=7),
            "llm_int8_skip_modules is 7 instead of a list of strings",
        ),
        (
            "bnb-nf4-nested",
            lambda c, t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].fill_(7),
            f"{Q} cannot be read: .* cannot be read",
        ),
    ],
)
def test_wrong_checkpoints_are_refused(tmp_path, name, change, message):
    folder = changed(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_nvfp4_is_refused_by_name():
    with pytest.raises(CheckpointError, match="its format is 'nvfp4-pack-quantized', and tk reads"):
        load(Path(__file__).parent / "quantized" / "ct-nvfp4a16")


@pytest.mark.parametrize("name", ["gptq-qwen2-act-order", "ct-mixed"])
def test_chunks_prefixes_and_preemption_change_no_token(name):
    """Seeds and log-probabilities too."""
    folder = str(Path(__file__).parent / "quantized" / name)
    prompts = [[(7 * i + j * j) % 100 + 3 for j in range(40)] for i in range(3)]
    params = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": 2}
    answers = []
    for settings in (
        {"enforce_eager": True, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 8, "max_num_seqs": 3},
    ):
        llm = LLM(folder, dtype="float32", max_model_len=64, **settings)
        # The second time the prompts are cached, in part.
        answers += [[one.outputs[0] for one in generate(llm, prompts, **params)] for _ in "12"]
        llm.shutdown()
    for others in answers[1:]:
        for one, other in zip(answers[0], others, strict=True):
            assert one.token_ids == other.token_ids
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("name", ["ct-fp8-channel-dynamic", "gptq-v2-4bit-g64-asym"])
def test_fp8_cache_works_with_quantized_weights(name):
    """Its scales are folded into those of the weights."""
    folder = Path(__file__).parent / "quantized" / name
    expected = json.loads((folder / "expected.json").read_text())["greedy"]
    llm = LLM(str(folder), dtype="float32", max_model_len=64, kv_cache_dtype="fp8")
    outputs = generate(llm, [one["prompt"] for one in expected], max_tokens=1)
    llm.shutdown()
    clear = [
        (output.outputs[0].token_ids[0], one["tokens"][0])
        for one, output in zip(expected, outputs, strict=True)
        if one["margins"][0] > 0.3
    ]
    assert clear
    assert all(ours == theirs for ours, theirs in clear)


@pytest.mark.gpu
@each
def test_greedy_tokens_on_a_gpu_equal_transformers(folder):
    """With CUDA graphs, in bfloat16. They may differ after a near-tie."""
    expected = json.loads((folder / "expected.json").read_text())["greedy"]
    llm = LLM(
        str(folder),
        device="cuda",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory=0.05,
    )
    outputs = generate(llm, [one["prompt"] for one in expected], max_tokens=16)
    llm.shutdown()
    for one, output in zip(expected, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        for ours, theirs, margin in zip(tokens, one["tokens"], one["margins"], strict=True):
            if margin < VERSIONS["packed"]:
                break
            assert ours == theirs


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("modelopt-fp8", "hf_quant_config.json"),  # of NVIDIA's Model Optimizer
        ("gptq-4bit-g128", "quantize_config.json"),  # of AutoGPTQ
        ("awq-gemm-g64", "quant_config.json"),  # of AutoAWQ
    ],
)
def test_quantization_may_be_in_a_file_of_its_own(tmp_path, name, file):
    folder = Path(__file__).parent / "quantized" / name
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    given = raw.pop("quantization_config")
    if name == "modelopt-fp8":
        given = json.loads((folder / file).read_text())
    elif name == "gptq-4bit-g128":
        given = {key: given[key] for key in ("bits", "group_size", "desc_act", "sym")}
    else:
        given = {"w_bit": given["bits"], "q_group_size": given["group_size"], "version": "GEMM"}
    (tmp_path / file).write_text(json.dumps(given))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected, weights = dequantized(load(folder)), dequantized(load(tmp_path))
    assert expected.keys() == weights.keys()
    assert all(torch.equal(weights[name][2], one[2]) for name, one in expected.items())


def test_quantized_checkpoints_are_not_quantized_again():
    folder = Path(__file__).parent / "quantized" / "gptq-4bit-g128"
    with pytest.raises(ConfigError, match=r"--quantization int8: .* quantized \(gptq\). Leave"):
        load_config(folder, ModelConfig(quantization="int8"))
    with pytest.raises(CheckpointError, match="through Transformers must be in full precision"):
        load_config(folder, ModelConfig(model_impl="transformers"))


@each
@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_tokens_equal_transformers(folder, version):
    """With dequantized weights there. They may differ after a near-tie.

    The number of parameters is that of the dequantized model."""
    expected = json.loads((folder / "expected.json").read_text())["greedy"]
    with only_pytorch("dequantized") if version == "exact" else nullcontext():
        llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=64)
        outputs = generate(llm, [one["prompt"] for one in expected], max_tokens=16)
        llm.shutdown()
    assert llm.info.num_parameters == llm.info.model_parameters
    assert llm.info.num_parameters == read_folder(folder, "quantized").num_parameters
    compared = 0
    for one, output in zip(expected, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        for ours, theirs, margin in zip(tokens, one["tokens"], one["margins"], strict=True):
            if margin < VERSIONS[version]:
                break
            assert ours == theirs
            compared += 1
    assert compared >= (24 if version == "exact" else 1)
