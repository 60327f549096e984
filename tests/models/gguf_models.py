"""Models of Transformers as GGUF files, with what llama.cpp's converter changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import Model
from tests.gguf_writer import Stored, plain, q8_0, write
from tests.references import Reference

_MODULES = {
    "attn_q": r"self_attn\.q_proj",
    "attn_k": r"self_attn\.k_proj",
    "attn_v": r"self_attn\.v_proj",
    "attn_qkv": r"self_attn\.qkv_proj|attention\.query_key_value|attn\.c_attn"
    r"|self_attention\.query_key_value|linear_attn\.in_proj_qkv",
    "attn_gate": r"linear_attn\.in_proj_z",
    "attn_output": r"self_attn\.(?:o_proj|dense)|attention\.dense|attn\.c_proj"
    r"|self_attention\.dense|self_attn\.out_proj",
    "attn_norm": r"input_layernorm|ln_1|ln_mlp|operator_norm",
    "attn_norm_2": r"ln_attn",
    "attn_q_norm": r"self_attn\.(?:q_norm|q_layernorm|query_layernorm)",
    "attn_k_norm": r"self_attn\.(?:k_norm|k_layernorm|key_layernorm)",
    "ffn_norm": r"post_attention_layernorm|ln_2|pre_feedforward_layernorm|ffn_norm",
    "post_ffw_norm": r"post_feedforward_layernorm|post_mlp_layernorm",
    "ffn_gate_inp": r"mlp\.(?:gate|router)",
    "ffn_gate_inp_shexp": r"mlp\.shared_expert_gate",
    "ffn_gate_shexp": r"mlp\.shared_experts?\.gate_proj",
    "ffn_up_shexp": r"mlp\.shared_experts?\.up_proj",
    "ffn_down_shexp": r"mlp\.shared_experts?\.down_proj",
    "ffn_gate": r"mlp\.gate_proj|feed_forward\.w1",
    "ffn_up": r"mlp\.(?:up_proj|fc1|gate_up_proj|dense_h_to_4h|c_fc)|feed_forward\.w3",
    "ffn_down": r"mlp\.(?:down_proj|fc2|dense_4h_to_h|c_proj)|feed_forward\.w2",
    "shortconv.conv": r"conv\.conv",
    "shortconv.in_proj": r"conv\.in_proj",
    "shortconv.out_proj": r"conv\.out_proj",
    "ssm_in": r"linear_attn\.in_proj_qkvz",
    "ssm_ba": r"linear_attn\.in_proj_ba",
    "ssm_alpha": r"linear_attn\.in_proj_a",
    "ssm_beta": r"linear_attn\.in_proj_b",
    "ssm_conv1d": r"linear_attn\.conv1d",
    "ssm_norm": r"linear_attn\.norm",
    "ssm_out": r"linear_attn\.out_proj",
}
_TOP = {
    "token_embd": r"(?:model\.embed_tokens|transformer\.wte|gpt_neox\.embed_in"
    r"|transformer\.word_embeddings)",
    "position_embd": r"transformer\.wpe",
    "output_norm": r"(?:model\.(?:norm|final_layernorm)|transformer\.ln_f"
    r"|gpt_neox\.final_layer_norm)",
    "output": r"(?:lm_head|embed_out)",
    "token_embd_norm": r"model\.embedding_norm",
}
_DELTA_NETS = {"qwen3next", "qwen35", "qwen35moe"}
_AFTER_ATTENTION = {
    *("gemma2", "gemma3", "olmo2", "exaone4", "seed_oss", "glm4moe", "gpt-oss"),
    *_DELTA_NETS,
}
"""Architectures whose `post_attention_layernorm` keeps its name."""
_PERMUTED = {"llama", "mistral3", "olmo", "granite", "smollm3", "arcee"}
_OFFSET_NORMS = {"gemma", "gemma2", "gemma3", "nemotron", *_DELTA_NETS}


def tensors_of(model: Model, architecture: str) -> dict[str, torch.Tensor]:
    """Return a model's tensors under llama.cpp's names, changed as its converter does."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    found: dict[str, torch.Tensor] = {}
    is_tied = config.tie_word_embeddings
    weights = weights_of(model)
    for name, tensor in weights.items():
        if (is_tied and name.startswith("lm_head")) or "norms." in name:
            continue
        if ".mlp.experts." in name:
            found |= stacks_of(name, tensor, is_interleaved=architecture == "gpt-oss")
            continue
        own = rename(name, architecture)
        if own.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")):
            tensor = tensor.squeeze()
        if own.endswith(".weight") and "c_" in name and architecture == "gpt2":
            tensor = tensor.T
        if own.endswith("shortconv.conv.weight"):
            tensor = tensor.squeeze(1)
        if "query_key_value" in name:
            tensor = split_heads(tensor, heads, kv_heads, is_neox=architecture == "gptneox")
        if architecture in _PERMUTED and re.search(r"attn_[qk]\.", own):
            count = heads if "attn_q." in own else kv_heads
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture in _OFFSET_NORMS and re.search(r"(?<!ssm_)norm\.weight", own):
            tensor = tensor + 1
        if "linear_attn." in name:
            found |= of_delta_net(own, tensor, config, architecture)
        else:
            found[own] = tensor
    for index in range(config.num_hidden_layers):
        for part, count in (("q", heads), ("k", kv_heads)):
            each = [
                weights.get(f"model.layers.{index}.self_attn.{part}_layernorm.norms.{head}.weight")
                for head in range(count)
            ]
            if each[0] is not None:
                found[f"blk.{index}.attn_{part}_norm.weight"] = torch.stack(each)
    if architecture == "chatglm":
        for index in range(config.num_hidden_layers):
            for part in ("weight", "bias"):
                own = [found.pop(f"blk.{index}.attn_{x}.{part}") for x in "qkv"]
                found[f"blk.{index}.attn_qkv.{part}"] = torch.cat(own)
    return found


def of_delta_net(
    own: str, tensor: torch.Tensor, config: Any, architecture: str
) -> dict[str, torch.Tensor]:
    """Return the tensors that llama.cpp's converter makes of one of a delta net."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys, values = groups * config.linear_key_head_dim, heads * config.linear_value_head_dim
    if own.endswith("ssm_a"):
        tensor = -tensor.exp()
    if own.endswith("ssm_conv1d.weight"):
        tensor = tensor.squeeze(1)
    if own.endswith("ssm_in.weight"):
        sizes = [part // groups for part in (keys, keys, values, values)]
        *qkv, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(sizes, 1))
        prefix = own.removesuffix("ssm_in.weight")
        return {f"{prefix}attn_qkv.weight": torch.cat(qkv), f"{prefix}attn_gate.weight": z}
    if architecture == "qwen3next" or own.endswith("ssm_norm.weight"):
        return {own: tensor}
    first = 2 * keys if own.endswith(("attn_qkv.weight", "ssm_conv1d.weight")) else 0
    dim = 1 if own.endswith("ssm_out.weight") else 0
    before, own_heads = tensor.split([first, tensor.shape[dim] - first], dim)
    own_heads = own_heads.unflatten(dim, (groups, heads // groups, -1)).transpose(dim, dim + 1)
    return {own: torch.cat((before, own_heads.flatten(dim, dim + 2)), dim)}


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    """Return a model's tensors by Transformers' names.

    Those of experts are stacks in its modules, and may be single matrices in its files."""
    if isinstance(model, Reference) and not model.is_used:
        weights = model.tensors()
        if not any(".experts." in name for name in weights):
            return weights
    return model.state_dict()


def rename(name: str, architecture: str) -> str:
    layer = re.fullmatch(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.(\d+)\.(.+)\.(\w+)", name)
    if layer is None:
        module, part = name.rsplit(".", 1)
        return next(f"{own}.{part}" for own, known in _TOP.items() if re.fullmatch(known, module))
    index, module, part = layer.groups()
    if part == "e_score_correction_bias":
        return f"blk.{index}.exp_probs_b.bias"
    if part in ("A_log", "dt_bias"):
        return f"blk.{index}.{'ssm_a' if part == 'A_log' else 'ssm_dt.bias'}"
    if part == "sinks":
        return f"blk.{index}.attn_sinks.weight"
    if module == "post_attention_layernorm" and architecture in _AFTER_ATTENTION:
        return f"blk.{index}.post_attention_norm.{part}"
    if module == "post_self_attn_layernorm":
        return f"blk.{index}.post_attention_norm.{part}"
    for own, known in _MODULES.items():
        if re.fullmatch(known, module):
            return f"blk.{index}.{own}.{part}"
    raise AssertionError(name)


def stacks_of(name: str, tensor: torch.Tensor, *, is_interleaved: bool) -> dict[str, torch.Tensor]:
    """Return the stacks of Transformers' tensor of all experts.

    `is_interleaved`: gate's columns and up's are in turn, and matrices are [columns, rows]."""
    prefix, part = f"blk.{name.split('.')[2]}.ffn", "bias" if name.endswith("bias") else "weight"
    if is_interleaved and part == "weight":
        tensor = tensor.transpose(1, 2)
    if "gate_up" not in name:
        return {f"{prefix}_down_exps.{part}": tensor}
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_interleaved else tensor.chunk(2, 1)
    return {f"{prefix}_gate_exps.{part}": gate, f"{prefix}_up_exps.{part}": up}


def split_heads(tensor: torch.Tensor, heads: int, kv_heads: int, *, is_neox: bool) -> torch.Tensor:
    """Reorder rows of [heads, q | k | v] to [q | k | v, heads]."""
    groups = heads if is_neox else kv_heads
    parts = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    return torch.cat([part.flatten(0, 2) for part in parts.split([heads // groups, 1, 1], 1)])


def metadata_of(model: Model, architecture: str) -> dict[str, object]:
    """Return the metadata that llama.cpp's converter writes for a model."""
    config = model.config

    def given(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None)), None)

    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    own: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": given("max_position_embeddings"),
        "embedding_length": config.hidden_size,
        "feed_forward_length": given("intermediate_size", "ffn_hidden_size", "n_inner")
        or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": num_kv_heads(config),
        "attention.layer_norm_rms_epsilon": given("rms_norm_eps"),
        "attention.layer_norm_epsilon": given(
            "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"
        ),
        "attn_logit_softcapping": given("attn_logit_softcapping"),
        "final_logit_softcapping": given("final_logit_softcapping"),
        "attention.clamp_kqv": given("clip_qkv"),
        "attention.scale": given("attention_multiplier"),
        "embedding_scale": given("embedding_multiplier"),
        "residual_scale": given("residual_multiplier"),
        "logit_scale": given("logits_scaling", "logit_scale"),
        "attention.sliding_window": given("sliding_window"),
    }
    own |= expert_metadata(config, architecture)
    if architecture == "lfm2":
        kinds = config.layer_types
        counts = [num_kv_heads(config) if kind == "full_attention" else 0 for kind in kinds]
        inner = weights_of(model)["model.layers.0.feed_forward.w1.weight"]
        own |= {
            "attention.head_count_kv": counts,
            "attention.layer_norm_rms_epsilon": own.pop("attention.layer_norm_epsilon"),
            "feed_forward_length": len(inner),
            "shortconv.l_cache": config.conv_L_cache,
        }
    if architecture in _DELTA_NETS:
        own |= delta_net_metadata(config)
    if architecture == "qwen35moe":
        own["feed_forward_length"] = None
    if architecture in ("qwen35", "qwen35moe"):
        own["rope.dimension_sections"] = [11, 11, 10, 0]
    if architecture in ("gptneox", "stablelm"):
        own["use_parallel_residual"] = config.use_parallel_residual
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if "head_dim" in config.to_dict() and architecture != "falcon":
        own |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if rope:
        own["rope.freq_base"] = float(rope["rope_theta"])
        own["rope.dimension_count"] = int(head_size * rope.get("partial_rotary_factor", 1.0))
        own["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        if rope["rope_type"] in ("linear", "yarn"):
            own["rope.scaling.type"] = rope["rope_type"]
            own["rope.scaling.factor"] = rope["factor"]
            own["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
            own["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow")
        own["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim")
        own["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    if architecture == "hunyuan-dense":
        theta, size = rope["rope_theta"], head_size
        own["rope.freq_base"] = float(theta * rope["alpha"] ** (size / (size - 2)))
    if local and architecture == "gemma3":
        own["rope.freq_base_swa"] = float(local["rope_theta"])
    prefixed = {f"{architecture}.{key}": value for key, value in own.items() if value is not None}
    return {"general.architecture": architecture, **prefixed}


def expert_metadata(config: Any, architecture: str) -> dict[str, object]:
    def given(*names: str) -> Any:
        return next((getattr(config, name) for name in names if hasattr(config, name)), None)

    count = given("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if count is None:
        return {}
    own: dict[str, object] = {
        "expert_count": count,
        "expert_used_count": given("num_experts_per_tok", "moe_k"),
        "expert_feed_forward_length": given("moe_intermediate_size"),
        "expert_shared_feed_forward_length": given("shared_expert_intermediate_size"),
        "expert_shared_count": given("n_shared_experts", "moe_num_shared_experts"),
        "expert_group_count": given("n_group"),
        "expert_group_used_count": given("topk_group"),
        "leading_dense_block_count": given("first_k_dense_replace", "moe_layer_start_index"),
        "interleave_moe_layer_step": given("moe_layer_interval"),
        "expert_weights_scale": given("routed_scaling_factor"),
    }
    if architecture == "glm4moe":
        own |= {"expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2}
    if architecture == "gpt-oss":
        own["expert_feed_forward_length"] = config.intermediate_size
    if architecture == "ernie4_5-moe":  # not the size of the shared experts, but written
        own["expert_shared_feed_forward_length"] = (
            config.intermediate_size // config.num_key_value_heads
        )
    return own


def delta_net_metadata(config: Any) -> dict[str, object]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [one == "linear_attention" for one in config.layer_types],
        "full_attention_interval": 4,
    }


def num_kv_heads(config: Any) -> int:
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1
    names = ("num_kv_heads", "num_key_value_heads", "num_attention_heads")
    return next(getattr(config, name) for name in names if getattr(config, name, None))


def factors_of(model: Model) -> dict[str, torch.Tensor]:
    """Return the factors on frequencies, which are tensors in GGUF."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        size = model.config.hidden_size // model.config.num_attention_heads
        plain_frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
        return {"rope_freqs.weight": (plain_frequencies / frequencies.double()).float()}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"])
            for kind in ("short", "long")
        }
    return {}


def write_model(
    path: Path,
    model: Model,
    architecture: str,
    *,
    quantized: bool = False,
    extra: Mapping[str, torch.Tensor] | None = None,
    **more: object,
) -> Path:
    """Write a model. `quantized`: matrices in Q8_0; `extra`: tensors; `more`: metadata, with __ for
    dots."""
    tensors = {**factors_of(model), **tensors_of(model, architecture), **(extra or {})}
    stored: dict[str, Stored] = {
        name: q8_0(tensor) if quantized and is_quantizable(name, tensor) else plain(tensor)
        for name, tensor in tensors.items()
    }
    metadata = metadata_of(model, architecture)
    metadata |= {key.replace("__", "."): value for key, value in more.items()}
    return write(path, metadata, stored)


def is_quantizable(name: str, tensor: torch.Tensor) -> bool:
    is_kept = any(part in name for part in ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d"))
    return tensor.dim() >= 2 and tensor.shape[-1] % 32 == 0 and not is_kept
