"""Write Llama-like and GPT-2 checkpoints with linear layers rounded to nearest, as others do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import max_pool2d

from toolkit.config import EngineConfig
from toolkit.gguf.folder import is_gguf
from toolkit.models.build import load_config
from toolkit.models.config.overrides import read_config
from toolkit.weights.formats import QUANTIZATION_FIELDS
from toolkit.weights.loading.dense import read_dense
from toolkit.weights.loading.loader import stored_tensors

FP8_MAX = 448.0
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4")
"""Types that the package `gguf` can write and tk can read."""
GGUF_COLUMNS = 32
"""Columns of a block of these types."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in full precision. Weights of linear layers are [out, in], also GPT-2's."""

    config: dict[str, Any]
    linear: Tensors  # by their modules' names
    others: Tensors  # by their own names

    @property
    def is_gpt2(self) -> bool:
        return bool(self.config["model_type"] == "gpt2")

    @property
    def num_linear(self) -> int:
        return sum(weight.numel() for weight in self.linear.values())

    def write(self, folder: Path) -> None:
        """Write it in full precision."""
        plain = {
            f"{name}.weight": weight.T.contiguous() if self.is_gpt2 else weight
            for name, weight in self.linear.items()
        }
        _save(folder, self.config, {**self.others, **plain})


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder with one safetensors file, or dequantize a GGUF file to bfloat16."""
    config = read_config(path)
    if is_gguf(path):
        packings = load_config(
            path, EngineConfig.from_settings({"model": str(path)}).model
        ).packings
        assert packings is not None
        shapes = {tensor.name: tensor.shape for tensor in stored_tensors(path)}
        dense = read_dense(path, packings, shapes)
        tensors = {name: tensor.bfloat16() for name, tensor in dense.items()}
        config = {name: config[name] for name in config.keys() - QUANTIZATION_FIELDS}
        config["dtype"] = "bfloat16"
    else:
        tensors = load_file(path / "model.safetensors")
    is_transposed = config["model_type"] == "gpt2" and not config.pop("has_linear_layout", False)
    is_linear = re.compile(r"(model\.layers|transformer\.h)\.\d+\.").match
    linear = {name for name, tensor in tensors.items() if is_linear(name) and tensor.dim() == 2}
    return Checkpoint(
        config,
        {
            name.removesuffix(".weight"): tensors[name].T if is_transposed else tensors[name]
            for name in sorted(linear)
        },
        {name: tensor for name, tensor in tensors.items() if name not in linear},
    )


@dataclass(frozen=True, slots=True)
class Method:
    """A way to round weights, as a format of checkpoints."""

    encode: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    """Returns the tensors for a weight in fp32, by the ends of their names."""
    config: dict[str, Any]  # quantization_config
    columns: int = 1  # Each weight's number of columns must be a multiple

    def write(self, checkpoint: Checkpoint, folder: Path) -> float:
        """Write the rounded checkpoint. Returns its bits per linear weight, with scales."""
        encoded = {
            f"{name}.{end}": tensor.contiguous()
            for name, weight in checkpoint.linear.items()
            for end, tensor in self.encode(weight.float()).items()
        }
        config = checkpoint.config | {"quantization_config": self.config}
        _save(folder, config, {**checkpoint.others, **encoded})
        return 8 * sum(tensor.nbytes for tensor in encoded.values()) / checkpoint.num_linear


def fp8(
    weight: torch.Tensor, scale: str, dtype: torch.dtype, block: int
) -> dict[str, torch.Tensor]:
    """Round to e4m3 with a scale for each square of `block` numbers. 0: for each row."""
    rows, columns = weight.shape
    size = (block, block) if block else (1, columns)
    largest = max_pool2d(weight.abs()[None], size, ceil_mode=True)[0].clamp(min=1e-9)
    scales = (largest / FP8_MAX).to(dtype)
    spread = scales.float().repeat_interleave(size[0], 0)[:rows]
    spread = spread.repeat_interleave(size[1], 1)[:, :columns]
    values = (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": values, scale: scales}


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round to int8 with a scale for each row, symmetrically."""
    scales = (weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}


def int4(weight: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Round to 4 bits with a scale and a zero point for each group of `size` columns."""
    groups = weight.view(len(weight), -1, size)
    least, greatest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((greatest - least) / 15).clamp(min=1e-9).bfloat16()
    zeros = (-least / scales.float()).round().clamp(0, 15)
    values = (groups / scales.float()[:, :, None]).round() + zeros[:, :, None]
    return {
        "weight_packed": _packed(values.clamp(0, 15).flatten(1)),
        "weight_scale": scales,
        "weight_zero_point": _packed(zeros.T).T,
    }


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Pack integers of 4 bits, eight of a row in an int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    words = (values.long().reshape(len(values), -1, 8) << shifts).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    scheme = {"format": kind, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kind,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def _int4_groups(size: int) -> Method:
    how = {"type": "int", "num_bits": 4, "symmetric": False}
    config = _compressed("pack-quantized", **how, strategy="group", group_size=size)
    return Method(partial(int4, size=size), config, size)


METHODS = {
    "FP8, a scale for each row": Method(
        partial(fp8, scale="weight_scale", dtype=torch.bfloat16, block=0),
        _compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
    ),
    "FP8, blocks of 128 × 128": Method(
        partial(fp8, scale="weight_scale_inv", dtype=torch.float32, block=128),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "int8, a scale for each row": Method(
        int8, _compressed("int-quantized", type="int", num_bits=8, strategy="channel")
    ),
    **{f"int4, zero points, groups of {size}": _int4_groups(size) for size in (128, 64, 32)},
}


def write_gguf(checkpoint: Checkpoint, file: Path, kind: str) -> float:
    """Write a GGUF file without tokenizer. Returns its bits per linear weight, with scales.

    Tensors that are not rounded are stored in F32. Needs the package `gguf`."""
    import gguf

    given, is_gpt2 = checkpoint.config, checkpoint.is_gpt2
    own = gguf.MODEL_ARCH.GPT2 if is_gpt2 else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(file, given["model_type"])
    layers = given["n_layer" if is_gpt2 else "num_hidden_layers"]
    heads = given["n_head" if is_gpt2 else "num_attention_heads"]
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(given["vocab_size"])
    if is_gpt2:
        writer.add_context_length(given["n_positions"])
        writer.add_embedding_length(given["n_embd"])
        writer.add_feed_forward_length(given.get("n_inner") or 4 * given["n_embd"])
        writer.add_layer_norm_eps(given["layer_norm_epsilon"])
    else:
        rope = given.get("rope_parameters") or given
        writer.add_context_length(given["max_position_embeddings"])
        writer.add_embedding_length(given["hidden_size"])
        writer.add_feed_forward_length(given["intermediate_size"])
        writer.add_layer_norm_rms_eps(given["rms_norm_eps"])
        writer.add_head_count_kv(given["num_key_value_heads"])
        writer.add_rope_freq_base(rope["rope_theta"])
    names = gguf.get_tensor_name_map(own, layers)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, tensor in checkpoint.others.items():
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(renamed, tensor.float().numpy())
    num_bytes = 0
    for name, weight in checkpoint.linear.items():
        if name.endswith(("q_proj", "k_proj")):  # llama.cpp rotates adjacent pairs
            count = heads if name.endswith("q_proj") else given["num_key_value_heads"]
            pairs = weight.view(count, 2, -1, weight.shape[1])
            weight = pairs.transpose(1, 2).flatten(0, 2)
        data = gguf.quants.quantize(weight.float().contiguous().numpy(), wanted)
        writer.add_tensor(f"{names.get_name(name)}.weight", data, raw_dtype=wanted)
        num_bytes += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 8 * num_bytes / checkpoint.num_linear


def _save(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
