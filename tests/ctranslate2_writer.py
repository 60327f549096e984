"""A small writer of folders in CTranslate2's format, for a tiny Whisper, also wrong ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

TYPES = (
    *(torch.float32, torch.int8, torch.int16, torch.int32),
    *(torch.float16, torch.bfloat16),
)
VOCABULARY = [
    *(f"token {i}" for i in range(20)),
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    "<|0.00|>",
    "<|0.02|>",
]
WIDTH, HIDDEN, BINS, LAYERS = 8, 12, 5, 2
_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
_OTHERS = {
    "embed_tokens": "embeddings",
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "final_layer_norm": "ffn/layer_norm",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
    "self_attn.out_proj": "self_attention/linear_1",
    "encoder_attn.q_proj": "attention/linear_0",
    "encoder_attn.out_proj": "attention/linear_2",
}
_JOINED = {
    "self_attn": ("self_attention/linear_0", "qkv"),
    "encoder_attn": ("attention/linear_1", "kv"),
}


def whisper_tensors() -> dict[str, torch.Tensor]:
    """Return random tensors of a tiny Whisper by their names in the original checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (WIDTH, BINS, 3),
        "encoder.conv1.bias": (WIDTH,),
        "encoder.conv2.weight": (WIDTH, WIDTH, 3),
        "encoder.conv2.bias": (WIDTH,),
        "encoder.embed_positions.weight": (6, WIDTH),
        "decoder.embed_tokens.weight": (len(VOCABULARY), WIDTH),
        "decoder.embed_positions.weight": (7, WIDTH),
    }
    for side in ("encoder", "decoder"):
        shapes |= {f"{side}.layer_norm.{kind}": (WIDTH,) for kind in ("weight", "bias")}
        for layer in range(LAYERS):
            begin = f"{side}.layers.{layer}"
            shapes |= {f"{begin}.{name}": one for name, one in _layer_shapes(side).items()}
    torch.manual_seed(0)
    return {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    kind: torch.dtype = torch.float32,
    numbers: Mapping[str, int] | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write a folder. kind: of matrices; integers are quantized as CTranslate2 does.

    numbers: integers to change in `model.bin`, by name."""
    (folder / "vocabulary.json").write_text(json.dumps(VOCABULARY))
    given = {"suppress_ids": [1, 2], "suppress_ids_begin": [3], "alignment_heads": [[1, 0]]}
    (folder / "config.json").write_text(json.dumps(given | {"lang_ids": [5]} | dict(config or {})))
    integers = {
        "decoder/activation": 3,
        "decoder/num_heads": 2,
        "decoder/pre_norm": 1,
        "encoder/num_heads": 4,
    }
    found: dict[str, torch.Tensor] = {}
    for name, value in _renamed(tensors).items():
        found |= _quantized(name, value, kind)
    for name, number in (integers | dict(numbers or {})).items():
        found[name] = torch.tensor(number, dtype=torch.int16)
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    (folder / "model.bin").write_bytes(serialize(found, aliases))
    return folder


def serialize(
    variables: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    *,
    version: int = 6,
    layout: str = "WhisperSpec",
) -> bytes:
    """Return the bytes of a `model.bin`."""
    parts = [struct.pack("<I", version), text(layout), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        parts.append(text(name) + variable(value))
    parts.append(struct.pack("<I", len(aliases)))
    parts += [text(name) + text(other) for name, other in aliases.items()]
    return b"".join(parts)


def variable(value: torch.Tensor) -> bytes:
    """Return shape, type and bytes of a variable."""
    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    shape = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
    return shape + struct.pack("<BI", TYPES.index(value.dtype), len(data)) + data


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def _layer_shapes(side: str) -> dict[str, tuple[int, ...]]:
    attentions = ["self_attn", *["encoder_attn"] * (side == "decoder")]
    shapes: dict[str, tuple[int, ...]] = {
        "fc1.weight": (HIDDEN, WIDTH),
        "fc1.bias": (HIDDEN,),
        "fc2.weight": (WIDTH, HIDDEN),
        "fc2.bias": (WIDTH,),
    }
    for norm in (f"{one}_layer_norm" for one in (*attentions, "final")):
        shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    for attention in attentions:
        for one in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{attention}.{one}.weight"] = (WIDTH, WIDTH)
            if one != "k_proj":
                shapes[f"{attention}.{one}.bias"] = (WIDTH,)
    return shapes


def _renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by CTranslate2's names, with joined projections."""
    found = {}
    for name, value in tensors.items():
        module, _, kind = name.removeprefix("model.").rpartition(".")
        side, _, rest = module.partition(".")
        begin = side
        if rest.startswith("layers."):
            _, layer, rest = rest.split(".", 2)
            begin = f"{side}/layer_{layer}"
        attention, _, projection = rest.partition(".")
        joined, parts = _JOINED.get(attention, ("", ""))
        if projection in [f"{part}_proj" for part in parts]:
            if projection == "v_proj":
                names = [name.replace("v_proj", f"{part}_proj") for part in parts]
                found[f"{begin}/{joined}/{kind}"] = torch.cat(
                    [tensors.get(one, torch.zeros_like(value)) for one in names]
                )
            continue
        if rest == "embed_positions":
            found[f"{begin}/position_encodings/encodings"] = value
            continue
        if "norm" in rest:
            kind = {"weight": "gamma", "bias": "beta"}[kind]
        found[f"{begin}/{_OTHERS.get(rest, rest)}/{kind}"] = value
    return found


def _quantized(name: str, value: torch.Tensor, kind: torch.dtype) -> dict[str, torch.Tensor]:
    if kind.is_floating_point:
        return {name: value.to(kind)}
    if not name.endswith("/weight"):
        return {name: value}
    rows = value.flatten(1)
    scale = 127 / rows.abs().amax(1) if kind == torch.int8 else 1024 / rows.abs().max()
    scales = scale if kind == torch.int8 else scale.expand(len(rows))
    return {name: (rows * scales[:, None]).round().to(kind).view_as(value), f"{name}_scale": scale}
