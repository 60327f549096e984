"""Small random models of every decoder that Transformers lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.checkpoints import EOS, VOCAB

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SIZES: dict[int, tuple[str, ...]] = {
    VOCAB: ("vocab_size", "vocab_size_per_layer_input"),
    64: ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"),
    96: ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"),
    2: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
        *("decoder_layers", "num_decoder_layers", "num_key_value_heads", "mamba_expand"),
        *("num_experts_per_tok", "moe_topk", "top_k_experts", "index_n_heads"),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"),
        *("decoder_attention_heads", "encoder_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ),
    16: (
        *("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
        "index_head_dim",
    ),
    160: ("max_position_embeddings", "n_positions", "n_ctx"),
    32: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head"),
        "moe_shared_expert_intermediate_size",
    ),
    1: (
        *("n_group", "topk_group", "first_k_dense_replace", "max_window_layers"),
        *("decoder_sparse_step", "num_shared_experts", "n_shared_experts"),
    ),
    9: ("sliding_window", "attention_window_size"),
    8: (
        *("qk_rope_head_dim", "rotary_dim", "mamba_d_state", "state_size", "index_topk"),
        "hidden_size_per_layer_input",
    ),
    24: ("qk_head_dim",),
}
_TOKENS = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": 0}
_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds": False},
}


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return names if isinstance(names, str) else names[0]


def choose_config(model_type: str) -> PreTrainedConfig:
    """Return a small config, or the usual one if its checks refuse that."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    try:
        return _shrunk(cls, model_type)
    except Exception:  # each config has checks of its own
        return cls()


def _shrunk(cls: type[PreTrainedConfig], model_type: str) -> PreTrainedConfig:
    from transformers import PreTrainedConfig

    usual = cls()
    fields: dict[str, Any] = dict(_TOKENS)
    for size, names in _SIZES.items():
        fields |= {name: size for name in names if hasattr(usual, name)}
    if hasattr(usual, "qk_rope_head_dim"):  # compressed keys: one for each head, once expanded
        fields |= {"head_dim": 8, "num_key_value_heads": 4}
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    if kinds:
        count = max(2, len(kinds))
        fields["layer_types"] = (2 * kinds)[:count]
        fields |= {name: count for name in ("num_hidden_layers", "n_layer") if name in fields}
    for name in getattr(cls, "sub_configs", None) or {}:
        own = getattr(usual, name, None)
        if isinstance(own, PreTrainedConfig) and type(own) is not cls:
            fields[name] = _shrunk(type(own), type(own).model_type).to_dict()
    if getattr(usual, "is_decoder", None) is False:
        fields["is_decoder"] = True
    for name in list(fields):
        given = getattr(cls, name, None)
        if isinstance(given, property) and given.fset is None:
            del fields[name]
    return cls(**fields | _SPECIAL.get(model_type, {}))


def make_decoder(model_type: str) -> PreTrainedModel:
    """Make a model with random parameters, none of which has no effect."""
    import transformers

    config = choose_config(model_type)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, class_name(model_type))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return model
