"""Whisper in CTranslate2's layout: its tensors by their original names, and its configuration.

CTranslate2 joins the projections of an attention that read the same input: query, key and value,
or key and value of the cross-attention. Keys have a bias, which changes no answer and which the
original lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.ctranslate2.file import Model, Variable, read_model
from toolkit.errors import CheckpointError
from toolkit.files import failure, parse_json, read_text

_LAYOUT = "WhisperSpec"
_LAYER = re.compile(r"(encoder|decoder)/layer_(0|[1-9]\d{0,2})/(.+)")
_WEIGHT = re.compile(r"(.+)/(weight|bias|gamma|beta|encodings)")
_KINDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
_SELF = {"linear_0": ("q_proj", "k_proj", "v_proj"), "linear_1": ("out_proj",)}
_CROSS = {"linear_0": ("q_proj",), "linear_1": ("k_proj", "v_proj"), "linear_2": ("out_proj",)}
_OF_LAYERS = {
    **{f"self_attention/{own}": [f"self_attn.{n}" for n in names] for own, names in _SELF.items()},
    **{f"attention/{own}": [f"encoder_attn.{n}" for n in names] for own, names in _CROSS.items()},
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
"""Modules of a layer, by CTranslate2's names: the original's, in the order of rows."""
_OTHERS = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/position_encodings": "model.encoder.embed_positions",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "decoder/position_encodings": "model.decoder.embed_positions",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "decoder/projection": "proj_out",
}
_EMBEDDINGS, _HEAD = "decoder/embeddings/weight", "decoder/projection/weight"
_SCALE = "_scale"
_GELU = 3  # number of the activation
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SMALLEST_MULTILINGUAL = 51865  # tokens; models for English alone have one less
_SPECIAL = {
    "eos_token_id": "<|endoftext|>",
    "decoder_start_token_id": "<|startoftranscript|>",
    "no_timestamps_token_id": "<|notimestamps|>",
    "prev_sot_token_id": "<|startofprev|>",
}
_TASKS = ("transcribe", "translate")
_MAX_INITIAL_TIMESTAMP = 50


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor by its original name: some rows of a variable."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    num_bytes: int
    scale: Variable | None  # what the rows were multiplied with; one number is for all rows
    first_row: int  # of these rows in the variable


def read_whisper(folder: Path) -> Model:
    """Read a folder's `model.bin`. Raises CheckpointError if it is not valid, or no Whisper."""
    model = read_model(folder)
    if model.layout != _LAYOUT:
        raise model.error(
            f"has the layout {model.layout[:40]} of CTranslate2, of which tk reads {_LAYOUT} "
            f"alone. Use the original model"
        )
    return model


def named_tensors(model: Model) -> list[NamedTensor]:
    """Return the tensors by their original names. Raises CheckpointError for unknown ones."""
    tied = model.aliases.get(_HEAD) == _EMBEDDINGS
    found: list[NamedTensor] = []
    for name, variable in model.variables.items():
        is_scale = name.endswith(_SCALE) and name.removesuffix(_SCALE) in model.variables
        if variable.shape and not is_scale and not (tied and name == _HEAD):
            found += _named(model, name, variable)
    return found


def read_config(model: Model, folder: Path) -> dict[str, Any]:
    """Return config.json, as the original model has it. Raises CheckpointError."""
    _check_flags(model)
    vocab_size, width = _shape(model, _EMBEDDINGS, 2)
    _, bins, _ = _shape(model, "encoder/conv1/weight", 3)
    ids = _special_ids(model, _read_vocabulary(folder))
    plain = model.variables.get("encoder/layer_norm/gamma")
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "d_model": width,
        "num_mel_bins": bins,
        "max_source_positions": _shape(model, "encoder/position_encodings/encodings", 2)[0],
        "max_target_positions": _shape(model, "decoder/position_encodings/encodings", 2)[0],
        "activation_function": "gelu",
        "scale_embedding": bool(_number(model, "decoder/scale_embeddings", 0)),
        "tie_word_embeddings": model.aliases.get(_HEAD) == _EMBEDDINGS,
        "dtype": _TYPES.get(plain.kind if plain else "", "float32"),
        "bos_token_id": ids["eos_token_id"],
        "pad_token_id": ids["eos_token_id"],
        "eos_token_id": ids["eos_token_id"],
        "decoder_start_token_id": ids["decoder_start_token_id"],
    }
    for side in ("encoder", "decoder"):
        heads = _number(model, f"{side}/num_heads")
        if heads < 1 or width % heads:
            raise model.error(f"has {heads} heads for {width} numbers. Fetch or copy it again")
        config[f"{side}_layers"] = _num_layers(model, side)
        config[f"{side}_attention_heads"] = heads
        config[f"{side}_ffn_dim"] = _shape(model, f"{side}/layer_0/ffn/linear_0/weight", 2)[0]
    return config


def generation_config(model: Model, folder: Path) -> dict[str, Any]:
    """Return generation_config.json, as the original model has it. Raises CheckpointError.

    `lang_ids` of CTranslate2's config.json is not read: converters wrote wrong ones for models
    that know English alone. The vocabulary has the names of languages."""
    vocabulary = _read_vocabulary(folder)
    ids = _special_ids(model, vocabulary)
    given = _read_json(folder / "config.json")
    config: dict[str, Any] = {
        **ids,
        "bos_token_id": ids["eos_token_id"],
        "pad_token_id": ids["eos_token_id"],
        "suppress_tokens": given.get("suppress_ids") or [],
        "begin_suppress_tokens": given.get("suppress_ids_begin") or [],
        "alignment_heads": given.get("alignment_heads") or [],
        "max_initial_timestamp_index": _MAX_INITIAL_TIMESTAMP,
        "max_length": _shape(model, "decoder/position_encodings/encodings", 2)[0],
        "is_multilingual": _shape(model, _EMBEDDINGS, 2)[0] >= _SMALLEST_MULTILINGUAL,
    }
    if config["is_multilingual"]:
        tasks = {task: _find(folder, vocabulary, f"<|{task}|>") for task in _TASKS}
        begin, end = ids["decoder_start_token_id"] + 1, min(tasks.values())
        languages = [name for name, id in vocabulary.items() if begin <= id < end]
        config["lang_to_id"] = {name: vocabulary[name] for name in languages}
        config["task_to_id"] = tasks
    return config


def _named(model: Model, name: str, variable: Variable) -> Iterator[NamedTensor]:
    """Yield the tensors that a variable holds."""
    scale = model.variables.get(name + _SCALE) or model.variables.get(
        model.aliases.get(name, name) + _SCALE
    )
    _check_scale(model, name, variable, scale)
    originals = _original_names(model, name)
    rows, rest = divmod(variable.shape[0], len(originals))
    if rest:
        raise model.error(
            f"has {name} with {variable.shape[0]} rows for {len(originals)} projections"
        )
    num_bytes = variable.num_bytes // len(originals)
    for index, original in enumerate(originals):
        if not original.endswith("k_proj.bias"):
            yield NamedTensor(
                original,
                variable.kind,
                (rows, *variable.shape[1:]),
                variable.start + index * num_bytes,
                num_bytes,
                scale,
                index * rows,
            )


def _original_names(model: Model, name: str) -> list[str]:
    weight = _WEIGHT.fullmatch(name)
    if weight is not None:
        module, kind = weight[1], _KINDS.get(weight[2], weight[2])
        if module in _OTHERS:
            return [f"{_OTHERS[module]}.{kind}"]
        layer = _LAYER.fullmatch(module)
        if layer is not None and layer[3] in _OF_LAYERS:
            begin = f"model.{layer[1]}.layers.{layer[2]}"
            return [f"{begin}.{one}.{kind}" for one in _OF_LAYERS[layer[3]]]
    raise model.error(
        f"has the variable {name}, which Whisper does not have. Use the original model"
    )


def _check_scale(model: Model, name: str, variable: Variable, scale: Variable | None) -> None:
    if variable.kind not in _TYPES and scale is None:
        raise model.error(f"has {name} in {variable.kind} without scales. Fetch or copy it again")
    if scale is not None and (
        variable.kind not in ("I8", "I16")
        or scale.kind not in _TYPES
        or scale.shape not in ((), variable.shape[:1])
    ):
        raise model.error(
            f"has {name}, {list(variable.shape)} in {variable.kind}, with scales "
            f"{list(scale.shape)} in {scale.kind}, which tk does not read. Convert it again"
        )


def _check_flags(model: Model) -> None:
    """Raise CheckpointError for a decoder that is not Whisper's."""
    for name, expected in (("activation", _GELU), ("pre_norm", 1), ("alibi", 0)):
        found = _number(model, f"decoder/{name}", expected)
        if found != expected:
            raise model.error(
                f"has decoder/{name} {found}; Whisper's is {expected}. Use the original model"
            )


def _shape(model: Model, name: str, num_dimensions: int) -> tuple[int, ...]:
    variable = model.variables.get(name)
    if variable is None or len(variable.shape) != num_dimensions:
        raise model.error(
            f"lacks {name}, or it has not {num_dimensions} dimensions. Fetch it again"
        )
    return variable.shape


def _number(model: Model, name: str, default: int | None = None) -> int:
    variable = model.variables.get(name)
    if variable is None and default is not None:
        return default
    if variable is None or variable.shape or not variable.kind.startswith("I"):
        raise model.error(f"lacks {name}, or it is not an integer. Convert the model again")
    return variable.number


def _num_layers(model: Model, side: str) -> int:
    layers = {
        int(found[2])
        for name in model.variables
        if (found := _LAYER.match(name)) and found[1] == side
    }
    if layers != set(range(len(layers))) or not layers:
        raise model.error(f"lacks some layers of the {side}. Fetch or copy it again")
    return len(layers)


def _special_ids(model: Model, vocabulary: Mapping[str, int]) -> dict[str, int]:
    size = _shape(model, _EMBEDDINGS, 2)[0]
    if len(vocabulary) > size:
        raise model.error(f"has {size} tokens; its vocabulary file has {len(vocabulary)}")
    folder = model.file.parent
    return {field: _find(folder, vocabulary, token) for field, token in _SPECIAL.items()}


def _find(folder: Path, vocabulary: Mapping[str, int], token: str) -> int:
    if token not in vocabulary:
        raise CheckpointError(
            f"{folder}: the vocabulary file lacks {token}, which Whisper has. Fetch it again."
        )
    return vocabulary[token]


def _read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the ids of tokens. Raises CheckpointError."""
    tokens: Sequence[Any]
    if (folder / "vocabulary.json").is_file():
        tokens = _parsed(folder / "vocabulary.json", list)
    else:
        tokens = _text(folder / "vocabulary.txt").removesuffix("\n").split("\n")
    return {str(token): id for id, token in enumerate(tokens)}


def _read_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = _parsed(file, dict)
    return found


def _parsed(file: Path, kind: type) -> Any:
    try:
        found = parse_json(_text(file))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, kind):
        expected = "a list" if kind is list else "an object"
        raise CheckpointError(f"{file} must be {expected} in JSON. Fetch or copy it again.")
    return found


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {failure(error)}.") from None


def made_file(folder: Path, name: str) -> str:
    """Return the content of one of MADE_FILES. Raises CheckpointError for a wrong model."""
    return json.dumps(MADE_FILES[name](read_whisper(folder), folder))


MADE_FILES = {"config.json": read_config, "generation_config.json": generation_config}
"""Files whose content is derived from CTranslate2's."""
