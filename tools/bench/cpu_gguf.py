"""Convert a GPT-2 checkpoint to GGUF for llama.cpp. Needs `gguf` in the peer's environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

MODEL_TENSORS = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
}
LAYER_TENSORS = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Checkpoint names to GGUF names (gguf.constants.TENSOR_NAMES). The head shares the embedding."""
FP32_MATRICES = ("position_embd.weight",)
"""Matrices that stay in fp32, as in files made by llama.cpp's tools."""


def write(folder: Path, file: Path, kind: str) -> None:
    """Write matrices as `kind`, F16 or Q8_0. The vocabulary has token ids without text."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    matrices = gguf.GGMLQuantizationType[kind]
    writer.add_file_type(
        {"F16": gguf.LlamaFileType.MOSTLY_F16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[kind]
    )
    for name, tensor in read(folder / "model.safetensors").items():
        target = gguf_name(name)
        if target is None:
            continue
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = np.ascontiguousarray(tensor.T)  # the checkpoint has [in, out]
        is_converted = tensor.ndim == 2 and target not in FP32_MATRICES
        dtype = matrices if is_converted else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quants.quantize(tensor, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str | None:
    """Return the tensor's GGUF name, or None if it is not a weight."""
    name = name.removeprefix("transformer.")
    if found := re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name):
        number, part, kind = found.groups()
        return f"blk.{number}.{LAYER_TENSORS[part]}.{kind}" if part in LAYER_TENSORS else None
    return MODEL_TENSORS.get(name)


def read(file: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Read a safetensors file in fp32: length, JSON header, data."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ValueError(f"{name} has dtype {entry['dtype']}; only F32 is supported")
        start, end = entry["data_offsets"]
        flat = np.fromfile(file, np.float32, (end - start) // 4, offset=8 + size + start)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors
