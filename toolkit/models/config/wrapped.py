"""Checkpoints of models that also see: their text decoders alone. Imports no torch.

Such a config.json has the decoder's fields in `text_config`, or next to those of the tower; the
decoder's tensors have `language_model.` or `text_model.` in their names, and the tower's other
beginnings."""

from collections.abc import Mapping
from typing import Any

from toolkit.weights.formats import QUANTIZATION_FIELDS
from toolkit.weights.names import text_pattern

_DECODERS: Mapping[str, Mapping[str | None, str]] = {
    "gemma3": {"gemma3_text": "gemma3_text", None: "gemma3_text"},
    "gemma4": {"gemma4_text": "gemma4_text", None: "gemma4_text"},
    "idefics3": {"llama": "llama", None: "llama"},
    "internvl": {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", None: "qwen2"},
    "llama4": {"llama4_text": "llama4_text", None: "llama4_text"},
    "llava": {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", None: "llama"},
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3", None: "mistral"},
    "qwen3_asr": {"qwen3": "qwen3", None: "qwen3"},
    "qwen2_vl": {"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2", None: "qwen2"},
    "qwen2_5_vl": {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2", None: "qwen2"},
    "qwen3_5": {"qwen3_5_text": "qwen3_5_text", None: "qwen3_5_text"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "qwen3_5_moe_text", None: "qwen3_5_moe_text"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3", None: "qwen3"},
    "qwen3_vl_moe": {"qwen3_vl_moe_text": "qwen3_vl_moe_text", None: "qwen3_vl_moe_text"},
    "smolvlm": {"llama": "llama", None: "llama"},
}
"""By the `model_type` of config.json and of its text_config: the decoder's. None: without one."""
_TIED_BY_EITHER = ("llava",)
"""Models whose head is tied if config.json or its text_config says so."""
WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", *QUANTIZATION_FIELDS)
"""Fields of config.json that hold for the decoder, too, and come before its own."""
_OF_TOWER = (
    "text_config",
    "vision_config",
    "audio_config",
    "perceiver_config",
    "pixel_shuffle_factor",
)
"""Fields next to a decoder's. SmolVLM's text_config has the last two: earlier versions' tower."""
_AXES = ("mrope_section", "mrope_interleaved", "interleaved")
"""Parts of a rotation by three axes, which are equal for text."""


_OF_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    *("norm_topk_prob", "mlp_only_layers", "shared_expert_intermediate_size"),
)
"""Fields that Qwen3-ASR's text_config has from Qwen3-Omni's, and that it does not read."""


def unnest(raw: dict[str, Any]) -> dict[str, Any]:
    """Return Qwen3-ASR's config.json as Transformers has it; others as they are.

    Qwen's own (github.com/QwenLM/Qwen3-ASR) has the fields in `thinker_config`."""
    thinker = raw.get("thinker_config")
    if raw.get("model_type") != "qwen3_asr" or not isinstance(thinker, dict):
        return raw
    rest = {name: raw[name] for name in raw if name not in ("thinker_config", "support_languages")}
    found = {**thinker, **rest}
    if isinstance(text := thinker.get("text_config"), dict):
        unread = ("model_type", *_OF_EXPERTS)
        found["text_config"] = {name: text[name] for name in text if name not in unread}
        found.setdefault("tie_word_embeddings", text.get("tie_word_embeddings", True))
    return found


def decoder_of(raw: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of a config.json's decoder; None if the model has no tower."""
    kind = raw.get("model_type")
    known = _DECODERS.get(kind) if isinstance(kind, str) else None
    if known is None:
        return None
    nested = raw.get("text_config")
    named = nested.get("model_type") if isinstance(nested, dict) else None
    return known.get(named) if named is None or isinstance(named, str) else None


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the decoder, without `architectures`; the same without a tower."""
    decoder = decoder_of(raw)
    if decoder is None:
        return raw
    nested = raw.get("text_config")
    own = nested if isinstance(nested, dict) and nested else raw
    found = {name: value for name, value in own.items() if name not in _OF_TOWER}
    found |= {name: raw[name] for name in WHOLE if raw.get(name) is not None}
    if raw["model_type"] in _TIED_BY_EITHER and own.get("tie_word_embeddings"):
        found["tie_word_embeddings"] = True
    for name in QUANTIZATION_FIELDS:
        if name in found:
            found[name] = _in_text(found[name])
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(name), dict):
            found[name] = _along_one_axis(rope)
    return found | {"model_type": decoder}


def _along_one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in rope.items() if name not in _AXES}
    return {
        name: "default" if name in ("type", "rope_type") and value == "mrope" else value
        for name, value in found.items()
    }


def _in_text(value: Any) -> Any:
    """Rename the modules in a quantization_config: in texts, lists, and names of fields."""
    if isinstance(value, dict):
        return {text_pattern(name): _in_text(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_text(one) for one in value]
    return text_pattern(value) if isinstance(value, str) else value
