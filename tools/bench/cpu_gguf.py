"""A GPT-2 checkpoint as a GGUF file, what llama.cpp loads; with the package `gguf`, in the peer's environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

WHOLE = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
}
IN_A_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Names of the checkpoint, and of GGUF (gguf.constants.TENSOR_NAMES). The head's weight is the embedding's."""
KEPT = ("position_embd.weight",)
"""Of matrices, what stays in fp32, as in files of llama.cpp's own tools."""


def write(folder: Path, file: Path, kind: str) -> None:
    """`kind` of the matrices: F16 or Q8_0. Tokens have numbers and no text."""
    import gguf  # type: ignore[import-not-found]  # of the peer's environment

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
        to = gguf_name(name)
        if to is None:
            continue
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = np.ascontiguousarray(tensor.T)  # the checkpoint has [in, out]
        own = matrices if tensor.ndim == 2 and to not in KEPT else gguf.GGMLQuantizationType.F32
        writer.add_tensor(to, gguf.quants.quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str | None:
    """None: it is not among a model's weights."""
    name = name.removeprefix("transformer.")
    if found := re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name):
        number, part, kind = found.groups()
        return f"blk.{number}.{IN_A_LAYER[part]}.{kind}" if part in IN_A_LAYER else None
    return WHOLE.get(name)


def read(file: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Tensors of a safetensors file in fp32: a length, a header in JSON, and the numbers."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ValueError(f"{name} is in {entry['dtype']}, and only fp32 is read here")
        start, end = entry["data_offsets"]
        flat = np.fromfile(file, np.float32, (end - start) // 4, offset=8 + size + start)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors
