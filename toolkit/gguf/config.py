"""Derive config.json and the original checkpoint's tensors from GGUF files."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.gguf.architectures import ARCHITECTURES, Architecture
from toolkit.gguf.file import GGUF, GGUFTensor, TensorType
from toolkit.gguf.sizes import LAYER, MAX_EXPERTS, check_sizes, drafting_layers
from toolkit.gguf.values import Values, shortest

_TOP = re.compile(r"(.+)\.(weight|bias)")
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_READ_ELSEWHERE = re.compile(
    r"""
    vocab_size | rope\.dimension_(count|sections) | rope\.scaling\.\w+ | tensor_data_layout
    | pooling_type | ssm\.inner_size | full_attention_interval | attention\.recurrent_layers
    | attention\.(causal|(key|value)_length|head_count_kv|layer_norm_epsilon|sliding_window\w*)
    | attention\.temperature_(scale|length) | nextn_predict_layers
    | expert_(gating_func|shared_feed_forward_length)
    """,
    re.VERBOSE,
)
"""Metadata that is read below, or that repeats what the architecture implies."""
_REQUIRED = (
    *("block_count", "embedding_length", "attention.head_count", "context_length"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"),
)
_OF_VALUE_HEADS = (
    *("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight"),
    *("ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ssm_out.weight"),
)
"""Tensors with rows or columns of the value heads of a delta net."""
_DTYPES = {"F32": "float32", "F16": "float16"}
_MAX_FACTORS = 4096


@dataclass(frozen=True, slots=True)
class HeadsInTurn:
    """Order of a tensor that has the first head of each group, then the second ones, and so on.

    The original has the heads of a group one after the other."""

    first: int  # rows or columns before those of the heads
    groups: int
    heads: int  # of a group
    size: int  # rows or columns of a head
    dim: int  # 0: rows, 1: columns

    @property
    def order(self) -> list[int]:
        """The file's row or column for each of the original tensor."""
        begins = [
            self.first + (head * self.groups + group) * self.size
            for group in range(self.groups)
            for head in range(self.heads)
        ]
        return [*range(self.first), *(begin + i for begin in begins for i in range(self.size))]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the original checkpoint, or of a part of it, and where it is in a GGUF file."""

    name: str
    stored: GGUFTensor
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    num_bytes: int
    pairs: int = 0
    """Head size, if the rows of each head are ordered to rotate adjacent pairs, else 0."""
    offset: float = 0.0  # what the converter added
    heads: HeadsInTurn | None = None
    is_decay: bool = False  # the file has -exp of the tensor

    @property
    def kind(self) -> TensorType:
        return self.stored.type


def architecture(model: GGUF) -> Architecture:
    """Raises CheckpointError if tk does not run the architecture from GGUF files."""
    name = model.get("general.architecture", str)
    if name in ARCHITECTURES:
        kind = ARCHITECTURES[name]
        has_experts = model.get(f"{name}.expert_count", object)
        return kind.with_experts if kind.with_experts and has_experts else kind
    if name == "clip":
        raise CheckpointError(
            f"{model.files[0]} is the part of a model that sees pictures (mmproj), which tk does "
            "not run. Serve the model's other file, for text."
        )
    raise CheckpointError(
        f"{model.files[0]}: unsupported architecture {name!r}. Supported in GGUF files: "
        f"{', '.join(ARCHITECTURES)}. Use the original model in safetensors: tk show NAME says "
        f"whether it runs."
    )


def named_tensors(model: GGUF) -> list[NamedTensor]:
    """Return the tensors under their names in the original checkpoint.

    A tensor with no name there keeps its own, so that the loader names it in its error. Those of
    layers that only draft are left out."""
    drafting = drafting_layers(Values(model))
    return [named for tensor in model.tensors for named in _named(model, tensor, drafting)]


def read_config(model: GGUF) -> dict[str, Any]:
    """Return the content of config.json.

    Raises CheckpointError for an unsupported architecture, a missing or wrong value, or one that
    may change what the model computes and that tk does not know."""
    kind = architecture(model)
    values = Values(model)
    _refuse_unknown(model, kind, values)
    names = {tensor.name: tensor for tensor in model.tensors}
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{model.files[0]} has no tensor token_embd.weight.")
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        "architectures": [kind.name],
        "dtype": _dtype(model),
        "vocab_size": names["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in names,
        **kind.constants,
        **{field: f"blk.0.{tensor}" in names for field, tensor in kind.biases.items()},
    }
    for key, field in kind.fields.items():
        value = values.get(key)
        if value is not None:
            config[field] = value
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        token = model.get(f"tokenizer.ggml.{key}_token_id", int)
        if token is not None:
            config[name] = token
    for required in _REQUIRED:
        if required in kind.fields and kind.fields[required] not in config:
            raise CheckpointError(f"{model.files[0]} has no metadata {values.name(required)}.")
    check_sizes(kind, names, values)
    if "block_count" in kind.fields:
        config[kind.fields["block_count"]] -= len(drafting_layers(values))
    if "rope.freq_base" in kind.fields:
        _add_rotation(config, model, values)
    finish = _FINISH.get(model.get("general.architecture", str))
    if finish is not None:
        finish(config, names, values)
    return config


def _refuse_unknown(model: GGUF, kind: Architecture, values: Values) -> None:
    for key in values.names():
        if key in kind.fields or _READ_ELSEWHERE.fullmatch(key):
            continue
        value = model.get(values.name(key), object)
        if value not in (0, False, "", []):
            raise _unknown(model, values.name(key), value)
    gating = values.get("expert_gating_func")
    if gating not in (None, 0, kind.gating):
        raise _unknown(model, values.name("expert_gating_func"), gating)


def _unknown(model: GGUF, key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{model.files[0]} has {key}: {value!r:.60}, which tk does not know for this "
        f"architecture. Use the original model in safetensors."
    )


def _dtype(model: GGUF) -> str:
    """Return the type of most weights if it is a plain one, else bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + math.prod(tensor.shape)
    return _DTYPES.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _head_size(config: dict[str, Any]) -> int:
    hidden = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config["n_head"]
    return int(config.get("head_dim") or hidden // max(1, heads))


def _add_rotation(config: dict[str, Any], model: GGUF, values: Values) -> None:
    """Add the rotation's base, its part of a head, and its scaling."""
    head_size = _head_size(config)
    if values.get("attention.value_length") not in (None, head_size):
        raise CheckpointError(
            f"{model.files[0]} has keys of {head_size} entries and values of "
            f"{values.get('attention.value_length')}. tk needs the same size."
        )
    rotated = values.get("rope.dimension_count") or head_size
    if not isinstance(rotated, int) or not 0 < rotated <= head_size or rotated % 2:
        raise values.error(f"{values.name('rope.dimension_count')} {rotated!r} for {head_size}")
    parameters: dict[str, Any] = {"rope_type": "default"}
    base = config.pop("rope_theta", None) or 10000.0
    if not isinstance(base, int | float) or not 0 < base < math.inf:
        raise values.error(f"{values.name('rope.freq_base')} {base!r}")
    parameters["rope_theta"] = float(base)
    # Always given: some architectures have another default than all entries of a head.
    parameters["partial_rotary_factor"] = rotated / head_size
    parameters |= _scaling(config, model, values, rotated)
    config["rope_parameters"] = parameters


def _scaling(config: dict[str, Any], model: GGUF, values: Values, rotated: int) -> dict[str, Any]:
    factors = _factors(model, rotated)
    numbers = (
        *("original_context_length", "factor", "attn_factor"),
        *("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"),
    )
    for key in numbers:
        value = values.get(f"rope.scaling.{key}")
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise values.error(f"{values.name(f'rope.scaling.{key}')} {value!r}")
    original = values.get("rope.scaling.original_context_length")
    if "rope_freqs" in factors:  # llama.cpp stores the result of Llama 3's scaling
        own = factors["rope_freqs"]
        return {
            "rope_type": "longrope",
            "short_factor": own,
            "long_factor": own,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    if factors and original is None:
        raise CheckpointError(
            f"{model.files[0]} has no metadata "
            f"{values.name('rope.scaling.original_context_length')}."
        )
    if factors:
        config["original_max_position_embeddings"] = original
        found = {
            "rope_type": "longrope",
            "short_factor": factors["rope_factors_short"],
            "long_factor": factors["rope_factors_long"],
            "original_max_position_embeddings": original,
        }
        attention = values.get("rope.scaling.attn_factor")
        return found if attention is None else found | {"attention_factor": attention}
    kind, factor = values.get("rope.scaling.type"), values.get("rope.scaling.factor")
    if kind in (None, "none") or factor in (None, 0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
            "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
        }
        if values.get("rope.scaling.yarn_log_multiplier"):
            found |= {
                "mscale": 1.0,
                "mscale_all_dim": values.get("rope.scaling.yarn_log_multiplier"),
            }
        return {key: value for key, value in found.items() if value is not None}
    raise CheckpointError(
        f"{model.files[0]} has the unsupported {values.name('rope.scaling.type')} {kind!r}. "
        f"Supported: linear, yarn, longrope."
    )


def _factors(model: GGUF, rotated: int) -> dict[str, list[float]]:
    """Return the tensors with a factor for each frequency, by name without .weight."""
    found = {}
    for tensor in model.tensors:
        if tensor.name not in _NOT_WEIGHTS:
            continue
        if tensor.type.name != "F32" or tensor.shape != (rotated // 2,) or rotated > _MAX_FACTORS:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has the type {tensor.type.name} and the shape "
                f"{list(tensor.shape)}; a rotation of {rotated} entries needs F32 and "
                f"[{rotated // 2}]."
            )
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            factors = struct.unpack(f"<{rotated // 2}f", stream.read(tensor.num_bytes))
        found[tensor.name.removesuffix(".weight")] = [shortest(factor) for factor in factors]
    return found


def _named(model: GGUF, tensor: GGUFTensor, drafting: range) -> Iterator[NamedTensor]:
    in_layer, at_top = LAYER.fullmatch(tensor.name), _TOP.fullmatch(tensor.name)
    if tensor.name in _NOT_WEIGHTS or (in_layer is not None and int(in_layer[1]) in drafting):
        return
    kind = architecture(model)
    whole = NamedTensor(tensor.name, tensor, tensor.shape, tensor.start, tensor.num_bytes)
    if in_layer is not None:
        yield from _named_in_layer(model, kind, whole, in_layer)
    elif at_top is not None and at_top[1] in kind.top:
        offset = kind.norm_offset if tensor.name == "output_norm.weight" else 0.0
        yield replace(whole, name=f"{kind.top[at_top[1]]}.{at_top[2]}", offset=offset)
    else:
        yield whole


def _named_in_layer(
    model: GGUF, kind: Architecture, whole: NamedTensor, match: re.Match[str]
) -> Iterator[NamedTensor]:
    index, tensor = match.groups()
    own, _, part = tensor.rpartition(".")
    prefix, modules = kind.layer_name.format(index), _layer_names(model, kind)
    if kind.has_value_heads_in_turn:
        whole = replace(whole, heads=_value_heads(whole, tensor, Values(model)))
    if tensor in kind.vectors:
        yield replace(whole, name=prefix + kind.vectors[tensor])
    elif tensor in kind.decays:
        yield replace(whole, name=prefix + kind.decays[tensor], is_decay=True)
    elif tensor in kind.rows:
        shape = (1, *whole.shape) if len(whole.shape) == 1 else whole.shape
        yield replace(whole, name=prefix + kind.rows[tensor], shape=shape)
    elif tensor in kind.convolutions and len(whole.shape) == 2:
        channels, width = whole.shape
        yield replace(whole, name=prefix + kind.convolutions[tensor], shape=(channels, 1, width))
    elif own in modules:
        yield from _parts(model, kind, whole, own, prefix + modules[own], part)
    else:
        yield whole


def _value_heads(whole: NamedTensor, tensor: str, values: Values) -> HeadsInTurn | None:
    """Return the order of a tensor's value heads; None if it has none, or the original order."""
    if tensor not in _OF_VALUE_HEADS:
        return None
    groups, total = values.size("ssm.group_count"), values.size("ssm.time_step_rank")
    first = 0
    if tensor in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * groups * values.size("ssm.state_size")
    dim = 1 if tensor == "ssm_out.weight" else 0
    rows = whole.shape[dim] - first if dim < len(whole.shape) else 0
    if total % groups or rows <= 0 or rows % total:
        raise values.error(
            f"{total} value heads of {groups} groups, and {whole.name} of the shape "
            f"{list(whole.shape)}"
        )
    if total == groups:
        return None
    return HeadsInTurn(first, groups, total // groups, rows // total, dim)


def _layer_names(model: GGUF, kind: Architecture) -> dict[str, str]:
    names = dict(kind.layer)
    if kind.model_type == "falcon" and _has(model, "blk.0.attn_norm_2.weight"):
        names |= {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    return names


def _has(model: GGUF, name: str) -> bool:
    return any(tensor.name == name for tensor in model.tensors)


def _parts(
    model: GGUF, kind: Architecture, whole: NamedTensor, own: str, module: str, part: str
) -> Iterator[NamedTensor]:
    """Yield a tensor of a layer under its name, or its parts if they have names of their own."""
    if "{head}" in module:
        if len(whole.shape) != 2:
            raise Values(model).error(f"{whole.name} of the shape {list(whole.shape)}")
        heads, size = whole.shape
        for head in range(heads):
            yield _rows(whole, f"{module.format(head=head)}.{part}", head, 1, (size,))
    elif "{expert}" in module:
        values = Values(model)
        count = values.size("expert_count")
        if len(whole.shape) < 2 or whole.shape[0] != count or count > MAX_EXPERTS:
            raise values.error(f"{whole.name} of the shape {list(whole.shape)} for {count} experts")
        for expert in range(count):
            name = f"{module.format(expert=expert)}.{part}"
            yield _rows(whole, name, expert, 1, whole.shape[1:])
    elif "{q,k,v}" in module:
        config = read_config(model)
        size = _head_size(config)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        first = 0
        for letter, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
            rows = count * size
            name = f"{module.replace('{q,k,v}', letter)}.{part}"
            yield _rows(whole, name, first, rows, (rows, *whole.shape[1:]))
            first += rows
    elif kind.has_pairs and own in ("attn_q", "attn_k"):
        values = Values(model)
        heads = values.get("attention.head_count")
        if own == "attn_k":
            heads = values.get("attention.head_count_kv") or heads
        if not isinstance(heads, int) or heads < 1 or whole.shape[0] % (2 * heads):
            raise values.error(f"{heads} heads for {whole.shape[0]} rows of {whole.name}")
        yield replace(whole, name=f"{module}.{part}", pairs=whole.shape[0] // heads)
    else:
        offset = kind.norm_offset if own.endswith("norm") and part == "weight" else 0.0
        yield replace(whole, name=f"{module}.{part}", offset=offset)


def _rows(
    whole: NamedTensor, name: str, first: int, count: int, shape: tuple[int, ...]
) -> NamedTensor:
    row_bytes = whole.num_bytes // whole.shape[0]
    return replace(
        whole,
        name=name,
        shape=shape,
        start=whole.start + first * row_bytes,
        num_bytes=count * row_bytes,
    )


# ---- what some architectures need besides


def _finish_llama(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    window = values.get("attention.sliding_window")
    if window and config["model_type"] == "llama":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config["sliding_window"] = window
        for field in ("attention_bias", "mlp_bias"):
            del config[field]


def _finish_gemma2(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    # The largest model has fewer entries in a head than the scale of its scores says.
    config["query_pre_attn_scalar"] = _scores_scale(config, layers=46)


def _finish_gemma3(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    config["query_pre_attn_scalar"] = _scores_scale(config, layers=62)
    config.setdefault("sliding_window", None)
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def _scores_scale(config: dict[str, Any], layers: int) -> float:
    if config["num_hidden_layers"] == layers:
        return float(config["hidden_size"] / config["num_attention_heads"])
    return float(_head_size(config))


def _finish_falcon(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    config["num_ln_in_parallel_attn"] = 2 if "blk.0.attn_norm_2.weight" in names else 1
    config.setdefault("num_kv_heads", config["num_attention_heads"])


def _finish_olmo2(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    window = values.get("attention.sliding_window")
    if window:
        config |= {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
        config["sliding_window"] = window
        # Layers with windows have a rotation without it, which would be another table.
        if config["rope_parameters"]["partial_rotary_factor"] == 1.0:
            del config["rope_parameters"]["partial_rotary_factor"]


def _finish_exaone4(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    config.setdefault("sliding_window", None)


def _finish_granite(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    if not config.get("attention_multiplier"):
        config["attention_multiplier"] = _head_size(config) ** -0.5
    for field in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        config[field] = config.get(field) or 1.0


def _finish_glm4moe(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    if not config.get("routed_scaling_factor"):
        config["routed_scaling_factor"] = 1.0


def _finish_gpt_oss(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # llama.cpp rounds, the original does not


def _finish_mistral3(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    beta = values.get("attention.temperature_scale")
    if beta:
        config["rope_parameters"]["llama_4_scaling_beta"] = beta


def _finish_lfm2(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    config["layer_types"] = [
        "full_attention" if f"blk.{index}.attn_q.weight" in names else "conv"
        for index in range(config["num_hidden_layers"])
    ]


def _finish_delta_nets(
    config: dict[str, Any], names: dict[str, GGUFTensor], values: Values
) -> None:
    config["layer_types"] = [
        "linear_attention" if f"blk.{index}.ssm_a" in names else "full_attention"
        for index in range(config["num_hidden_layers"])
    ]
    heads = values.size("ssm.time_step_rank")
    config["linear_value_head_dim"] = values.size("ssm.inner_size") // heads


def _finish_qwen3next(config: dict[str, Any], names: dict[str, GGUFTensor], values: Values) -> None:
    _finish_delta_nets(config, names, values)
    config["has_split_inputs"] = any(name.endswith(".attn_gate.weight") for name in names)


_FINISH: dict[str, Callable[[dict[str, Any], dict[str, GGUFTensor], Values], None]] = {
    "lfm2": _finish_lfm2,
    "qwen3next": _finish_qwen3next,
    "qwen35": _finish_delta_nets,
    "qwen35moe": _finish_delta_nets,
    "llama": _finish_llama,
    "gemma2": _finish_gemma2,
    "gemma3": _finish_gemma3,
    "falcon": _finish_falcon,
    "olmo2": _finish_olmo2,
    "exaone4": _finish_exaone4,
    "granite": _finish_granite,
    "glm4moe": _finish_glm4moe,
    "gpt-oss": _finish_gpt_oss,
    "mistral3": _finish_mistral3,
}
