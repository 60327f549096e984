"""Write the small quantized checkpoints of `tests/weights/quantized`, with independent writers.

    python -m tools.quantized_fixtures NAME ...

Each fixture needs the packages of its writer, which exclude one another: make a virtual environment
for each row. CI needs none of them, and no GPU is needed. Names start with:

| names | packages (versions used) |
|---|---|
| `gptq-`, `awq-` | gptqmodel 7.7.0 (`BUILD_CUDA_EXT=0 pip install --no-build-isolation`) |
| `autoround-` | auto-round 0.16.1, and gptqmodel to read |
| `ct-` | llmcompressor 0.14.0.1, compressed-tensors 0.19.0, transformers 5.17.0 |
| `ct-w4a16-g32-act-order` | llmcompressor 0.9.0, compressed-tensors 0.13.0, transformers 4.57.3, \
datasets 4.0.0 (`--no-deps`); later releases do not write it |
| `bnb-`, `fp8-` | bitsandbytes 0.50.2, accelerate, transformers 5.23.0 |
| `modelopt-` | nvidia-modelopt 0.47.0, accelerate |

A fixture is `config.json`, `model.safetensors` and `expected.json`: the writer and the call; for
each quantized module the shape, and the SHA-256 of the weight as an independent reader dequantizes
it (fp32, little-endian, 0 for -0, [out, in]; `dtype` is the type in which it computes); and greedy
tokens of Transformers in fp32 with these weights, unquantized activations and, for each token, the
margin between the best two logits."""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "weights" / "quantized"
VOCAB = 128
PROMPTS = ([1, 17, 42, 99, 5], [7, 120, 64, 3, 88, 31, 2, 55], [100, 11])
NEW_TOKENS = 16


def make_model(
    folder: Path,
    dtype: torch.dtype = torch.float16,
    *,
    family: str = "Llama",
    sizes: dict[str, int] | None = None,
) -> Path:
    """Save a tiny model whose parameters are all random, and a tokenizer of one word per token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = getattr(transformers, f"{family}Config")(
        **settings | (sizes or {}), tie_word_embeddings=False, bos_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 2 * parameter.shape[1] ** -0.5)
            if name.endswith("proj.weight"):  # rows whose zero points are the least and largest
                parameter[3].abs_()
                parameter[5].abs_().neg_()
    model.to(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="0", eos_token="1", pad_token="2", unk_token="0"
    ).save_pretrained(folder)
    return folder


def calibration(rows: int = 16, length: int = 32) -> list[list[int]]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (rows, length), generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint in a folder, and how an independent reader dequantizes it."""

    writer: str  # packages that wrote it
    call: str
    reader: str
    weights: dict[str, torch.Tensor]
    """Module names to weights [out, in], in the type in which the reader computes."""


Weights = tuple[str, dict[str, torch.Tensor]]
"""The reader, and the weights by the names of their modules."""


def greedy(folder: Path, weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Generate greedily in fp32 with Transformers and the dequantized weights."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((folder / "config.json").read_text())
    config = AutoConfig.for_model(**{k: settings[k] for k in settings if "quantization" not in k})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_file(folder / "model.safetensors")
    state |= {f"{name}.weight": weight for name, weight in weights.items()}
    state = {name: state[name].float().contiguous() for name in model.state_dict()}
    model.load_state_dict(state)
    answers = []
    for prompt in PROMPTS:
        ids, margins = list(prompt), []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            margins.append(round(float(best.values[0] - best.values[1]), 4))
        answers.append({"prompt": prompt, "tokens": ids[len(prompt) :], "margins": margins})
    return answers


def digest(weight: torch.Tensor) -> str:
    """Return the SHA-256 of the weight's bytes as little-endian fp32, with 0 for -0."""
    values = (weight.float() + 0.0).contiguous().numpy()
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def scrub(value: Any) -> Any:
    """Remove paths of this machine from a config."""
    if isinstance(value, dict):
        return {
            k: scrub(v)
            for k, v in value.items()
            if k != "_name_or_path" and not (isinstance(v, str) and v.startswith("/"))
        }
    return [scrub(v) for v in value] if isinstance(value, list) else value


def keep(name: str, folder: Path, written: Written) -> None:
    """Copy a checkpoint to the fixtures, with `expected.json`."""
    target = FIXTURES / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    config = scrub(json.loads((folder / "config.json").read_text()))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in ("model.safetensors", "hf_quant_config.json"):
        if (folder / file).exists():
            shutil.copyfile(folder / file, target / file)
    expected = {
        "writer": {package: version(package) for package in written.writer.split()},
        "call": written.call,
        "reader": written.reader,
        "weights": {
            module: {
                "shape": list(weight.shape),
                "dtype": str(weight.dtype).removeprefix("torch."),
                "sha256": digest(weight),
            }
            for module, weight in sorted(written.weights.items())
        },
        "greedy": greedy(target, written.weights),
    }
    text = json.dumps(expected, indent=1)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    (target / "expected.json").write_text(text + "\n")


# gptqmodel


def gptqmodel(folder: Path, base: Path, **settings: Any) -> Written:
    """Write with gptqmodel on the CPU."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it fails with one
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(base), QuantizeConfig(device="cpu", **settings), dtype=torch.float16)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    model.quantize(data, batch_size=1)
    model.save(str(folder))
    read = read_awq if settings.get("method") == "awq" else read_gptq
    call = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return Written("gptqmodel", f"QuantizeConfig({call})", *read(folder))


def read_gptq(folder: Path) -> Weights:
    """Dequantize with gptqmodel's layers."""
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(
        str(folder), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16
    )
    weights = {}
    for name, module in model.model.named_modules():
        if hasattr(module, "qweight"):
            module.eval()
            module.scales = module.scales.float()  # it computes in the type of the scales
            weight = type(module).dequantize_weight(module)
            weights[name] = weight.T.detach().clone()
    return "gptqmodel: dequantize_weight of its torch layers, with scales in fp32", weights


def read_awq(folder: Path) -> Weights:
    """Dequantize the tensors with gptqmodel's function."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    state = load_file(folder / "model.safetensors")
    weights = {}
    for name in (key.removesuffix(".qweight") for key in state if key.endswith(".qweight")):
        packed = state[f"{name}.qweight"], state[f"{name}.qzeros"], state[f"{name}.scales"].float()
        weights[name] = dequantize_gemm(*packed, config["bits"], config["group_size"]).T.clone()
    return "gptqmodel: dequantize_gemm, with scales in fp32", weights


GPTQ: dict[str, dict[str, Any]] = {
    "gptq-4bit-g128": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "gptq-4bit-g32-asym-act-order": {
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "desc_act": True,
        "act_group_aware": False,
    },
    "gptq-2bit-g64-asym": {"bits": 2, "group_size": 64, "sym": False, "desc_act": False},
    "gptq-3bit-g32-act-order": {"bits": 3, "group_size": 32, "sym": True, "desc_act": True},
    "gptq-8bit-channel": {
        "bits": 8,
        "group_size": -1,
        "sym": True,
        "desc_act": False,
        "act_group_aware": False,
    },
    "gptq-v2-4bit-g64-asym": {
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "desc_act": False,
        "format": "gptq_v2",
    },
    "gptq-dynamic": {
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "dynamic": {
            r"+:.*layers\.0\.mlp\.down_proj": {"bits": 8, "group_size": 32},
            r"-:.*layers\.1\.self_attn\.o_proj": {},
        },
    },
}


def write_gptq(folder: Path, name: str) -> Written:
    return gptqmodel(folder / "out", make_model(folder / "base"), **GPTQ[name])


def write_gptq_qwen2(folder: Path, name: str) -> Written:
    base = make_model(folder / "base", family="Qwen2")
    settings = GPTQ["gptq-4bit-g32-asym-act-order"] | {"group_size": 64, "sym": True}
    return gptqmodel(folder / "out", base, **settings)


def write_awq(folder: Path, name: str) -> Written:
    base = make_model(folder / "base")
    settings = {"method": "awq", "format": "gemm", "bits": 4, "group_size": 64, "sym": False}
    return gptqmodel(folder / "out", base, **settings)


# llmcompressor


def compressed_tensors(folder: Path, base: Path, modifier: str, **settings: Any) -> Written:
    """Write with llmcompressor, from a checkpoint in bf16."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers import quantization
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    recipe = getattr(quantization, modifier)(**copy.deepcopy(settings))
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=[recipe],
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]),
    )
    model.save_pretrained(folder, save_compressed=True)
    arguments = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    call = f"oneshot(recipe={modifier}({arguments}))"
    if "actorder" in arguments:
        return Written("llmcompressor compressed-tensors", call, *unpack(folder))
    return decompress(folder, call)


def unpack(folder: Path) -> Weights:
    """Read with a class of releases that still order groups by activations."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    state = load_file(folder / "model.safetensors")
    compressor = PackedQuantizationCompressor(None)
    weights = {}
    for name in (k.removesuffix("_packed") for k in state if k.endswith(".weight_packed")):
        parts = {f"weight{k[len(name) :]}": state[k] for k in state if k.startswith(f"{name}_")}
        parts["weight_scale"] = parts["weight_scale"].float()
        weights[name.removesuffix(".weight")] = compressor.decompress_weight(parts, args)
    return "compressed-tensors: decompress_weight, with scales in fp32", weights


def decompress(folder: Path, call: str) -> Written:
    """Read with Transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    reader = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    weights = {
        name: module.weight.detach().clone()
        for name, module in reader.named_modules()
        if hasattr(module, "quantization_scheme") and hasattr(module, "weight")
    }
    return Written(
        "llmcompressor compressed-tensors transformers",
        call,
        "transformers: from_pretrained(dtype=float32, run_compressed=False)",
        weights,
    )


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FLOAT8_TOKENS = FLOAT8 | {"strategy": "token", "dynamic": True}
LINEAR: dict[str, Any] = {"targets": ["Linear"], "ignore": ["lm_head"]}

COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ct-w4a16-g128": ("GPTQModifier", LINEAR | {"scheme": "W4A16"}),
    "ct-w4a16-g32-asym-regex": (
        "GPTQModifier",
        {
            "config_groups": {
                "group_0": {
                    "targets": [r"re:.*(self_attn|mlp)\..*_proj$"],
                    "weights": INT4 | {"group_size": 32, "symmetric": False},
                }
            },
            "ignore": ["lm_head", r"re:.*layers\.1\.self_attn\.[ov]_proj"],
        },
    ),
    # llmcompressor 0.9 or older
    "ct-w4a16-g32-act-order": (
        "GPTQModifier",
        {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": INT4 | {"group_size": 32, "symmetric": False, "actorder": "group"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "ct-w8a16-channel": (
        "QuantizationModifier",
        {
            "config_groups": {
                "channel": {
                    "targets": [r"re:.*layers\.0\..*"],
                    "weights": INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None},
                },
                "group": {
                    "targets": [r"re:.*layers\.1\..*"],
                    "weights": INT4 | {"num_bits": 8},
                },
            },
            "ignore": ["lm_head"],
        },
    ),
    "ct-fp8-tensor-static": (
        "QuantizationModifier",
        LINEAR | {"scheme": "FP8", "kv_cache_scheme": FLOAT8 | {"strategy": "tensor"}},
    ),
    "ct-fp8-channel-dynamic": ("QuantizationModifier", LINEAR | {"scheme": "FP8_DYNAMIC"}),
    "ct-fp8-block": ("QuantizationModifier", LINEAR | {"scheme": "FP8_BLOCK"}),
    "ct-int8-w8a8": ("QuantizationModifier", LINEAR | {"scheme": "INT8"}),
    "ct-naive-fp8-channel": (
        "QuantizationModifier",
        {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT8}},
            "ignore": ["lm_head"],
        },
    ),
    "ct-mixed": (
        "QuantizationModifier",
        {
            "config_groups": {
                "attention": {
                    "targets": [r"re:.*self_attn.*"],
                    "weights": FLOAT8,
                    "input_activations": FLOAT8_TOKENS,
                },
                "mlp": {"targets": [r"re:.*mlp.*"], "weights": INT4},
            },
            "ignore": ["lm_head"],
        },
    ),
    "ct-nvfp4a16": ("QuantizationModifier", LINEAR | {"scheme": "NVFP4A16"}),
}

PARTIAL_BLOCKS = {
    "hidden_size": 160,
    "intermediate_size": 192,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}


def write_compressed(folder: Path, name: str) -> Written:
    modifier, settings = COMPRESSED[name]
    sizes = PARTIAL_BLOCKS if name == "ct-fp8-block" else {}
    base = make_model(folder / "base", torch.bfloat16, sizes=sizes)
    return compressed_tensors(folder / "out", base, modifier, **settings)


def write_blocks(folder: Path, name: str) -> Written:
    """Write with llmcompressor's conversion of files, which keeps the patterns to ignore."""
    from llmcompressor import model_free_ptq

    base, out = make_model(folder / "base", torch.bfloat16), folder / "out"
    settings = {
        "scheme": "FP8_BLOCK",
        "ignore": [r"re:.*lm_head$", r"re:.*embed_tokens$", r"re:.*layers\.1\..*o_proj$"],
    }
    model_free_ptq(base, out, device="cpu", **settings)
    call = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return decompress(out, f"model_free_ptq({call})")


# Transformers


def write_fp8(folder: Path, name: str) -> Written:
    """Write with Transformers on the CPU, where it can convert but not run."""
    from unittest.mock import patch

    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It leaves weights that are not whole blocks as they are.
    base = make_model(folder / "base", torch.bfloat16, sizes={"num_key_value_heads": 4})
    out = folder / "out"
    settings = {"weight_block_size": (128, 128), "modules_to_not_convert": ["lm_head"]}
    with patch.object(quantizer_finegrained_fp8, "is_torch_xpu_available", lambda: True):
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(**settings)
        )
        model.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    weights = {
        module_name: module.weight.detach().clone()
        for module_name, module in model.named_modules()
        if module_name.endswith("_proj")
    }
    return Written(
        "transformers",
        "from_pretrained(quantization_config=FineGrainedFP8Config("
        "weight_block_size=(128, 128), modules_to_not_convert=['lm_head']))",
        "transformers: from_pretrained(dtype=float32) without a GPU",
        weights,
    )


# modelopt


def write_modelopt(folder: Path, name: str) -> Written:
    """Write with NVIDIA's Model Optimizer on the CPU, with scales of the KV cache."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base, out = make_model(folder / "base", torch.bfloat16), folder / "out"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["quant_cfg"] = mtq.utils.update_quant_cfg_with_kv_cache_quant(
        config, mtq.FP8_KV_CFG["quant_cfg"]
    )["quant_cfg"]

    def run(model: Any) -> None:
        for row in calibration():
            model(torch.tensor([row]))

    model = mtq.quantize(model, config, run)
    export_hf_checkpoint(model, export_dir=out)
    state = load_file(out / "model.safetensors")
    weights = {}
    for key in state:
        if key.endswith(".weight_scale"):
            weight = state[key.removesuffix("_scale")]
            tensor = FP8QTensor(weight.shape, torch.float32, weight)
            weights[key.removesuffix(".weight_scale")] = tensor.dequantize(scale=state[key])
    return Written(
        "nvidia-modelopt",
        "mtq.quantize(config=FP8_DEFAULT_CFG with FP8_KV_CFG); export_hf_checkpoint()",
        "modelopt: FP8QTensor.dequantize in fp32",
        weights,
    )


# bitsandbytes


def write_bitsandbytes(folder: Path, name: str) -> Written:
    """Write with Transformers and bitsandbytes on the CPU."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BITSANDBYTES[name]
    base, out = make_model(folder / "base", torch.bfloat16), folder / "out"
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**settings)
    )
    model.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    weights = {}
    for module_name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = module.weight
            weight.quant_state.dtype = torch.float32
            weights[module_name] = bitsandbytes.functional.dequantize_4bit(
                weight.data, weight.quant_state
            )
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weights[module_name] = bitsandbytes.functional.int8_vectorwise_dequant(
                module.weight.data, module.weight.SCB
            )
    call = ", ".join(f"{key}={str(value)!r}" for key, value in settings.items())
    reader = "int8_vectorwise_dequant" if "load_in_8bit" in settings else "dequantize_4bit"
    return Written(
        "bitsandbytes transformers",
        f"from_pretrained(quantization_config=BitsAndBytesConfig({call}))",
        f"bitsandbytes.functional: {reader}",
        weights,
    )


BITSANDBYTES: dict[str, dict[str, Any]] = {
    "bnb-nf4-nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb-int8": {"load_in_8bit": True},
}


# auto-round


def write_auto_round(folder: Path, name: str) -> Written:
    """Write with AutoRound on the CPU, tuned for a few steps."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = dict(AUTO_ROUND[name])
    form = settings.pop("format")
    base, out = make_model(folder / "base"), folder / "out"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
    data = [{"input_ids": torch.tensor([row])} for row in calibration()]
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(base),
        dataset=data,
        iters=2,
        nsamples=len(data),
        seqlen=32,
        batch_size=1,
        device_map="cpu",
        **copy.deepcopy(settings),
    )
    rounder.quantize_and_save(str(out), format=form)
    out = find(out)
    if form == "auto_round:auto_gptq":
        reader = read_auto_round(out)
    else:
        reader = (read_awq if "awq" in form else read_gptq)(out)
    call = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return Written(
        "auto-round", f"AutoRound(iters=2, {call}).quantize_and_save(format={form!r})", *reader
    )


def read_auto_round(folder: Path) -> Weights:
    """Dequantize with AutoRound's layers."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    state = load_file(folder / "model.safetensors")
    weights = {}
    for name in (key.removesuffix(".qweight") for key in state if key.endswith(".qweight")):
        scheme = config | config.get("extra_config", {}).get(name, {})
        columns = len(state[f"{name}.qweight"]) * 32 // scheme["bits"]
        rows = state[f"{name}.scales"].shape[1]
        layer = QuantLinear(scheme["bits"], scheme["group_size"], columns, rows, bias=False)
        for part in ("qweight", "qzeros"):
            setattr(layer, part, state[f"{name}.{part}"])
        layer.scales = state[f"{name}.scales"].float()
        weights[name] = layer(torch.eye(columns)).T.clone()
    return "auto-round: its torch layers, scales in fp32, times the identity matrix", weights


def find(folder: Path) -> Path:
    """Return the only folder below that has a config."""
    (config,) = folder.rglob("config.json")
    return config.parent


MIXED = {
    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
    "model.layers.1.self_attn.o_proj": {"bits": 16},
}
AUTO_ROUND: dict[str, dict[str, Any]] = {
    "autoround-gptq-mixed": {
        "format": "auto_round:auto_gptq",
        "scheme": "W4A16",
        "layer_config": MIXED,
    },
    "autoround-awq": {
        "format": "auto_round:auto_awq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "layer_config": {"model.layers.1.self_attn.o_proj": {"bits": 16}},
    },
    "autoround-gptq-asym": {
        "format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
    },
    "autoround-export-gptq": {"format": "auto_gptq", "bits": 4, "group_size": 64, "sym": True},
    "autoround-export-awq": {
        "format": "auto_awq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "layer_config": {"model.layers.1.self_attn.o_proj": {"bits": 16}},
    },
}

WRITERS: dict[str, Callable[[Path, str], Written]] = {
    **dict.fromkeys(GPTQ, write_gptq),
    "gptq-qwen2-act-order": write_gptq_qwen2,
    "awq-gemm-g64": write_awq,
    **dict.fromkeys(COMPRESSED, write_compressed),
    "ct-fp8-block-ignore": write_blocks,
    "fp8-block": write_fp8,
    "modelopt-fp8": write_modelopt,
    **dict.fromkeys(BITSANDBYTES, write_bitsandbytes),
    **dict.fromkeys(AUTO_ROUND, write_auto_round),
}


def main() -> None:
    """Write the named fixtures, with packages of the Python that runs this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=WRITERS, metavar="NAME")
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it gets logs
            written = WRITERS[name](Path(folder), name)
            keep(name, find(Path(folder) / "out"), written)


if __name__ == "__main__":
    main()
