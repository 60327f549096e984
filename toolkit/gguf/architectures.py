"""llama.cpp's names of architectures, metadata and tensors, and their names on the hub.

One row of `ARCHITECTURES` for each architecture of llama.cpp that tk runs, and what its converter
changes in the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_LAYER = "model.layers.{}."
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {
    "attn_output": "self_attn.o_proj"
}
_GATED_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORM_AFTER_ATTENTION = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
"""Those of `_NORMS`, under names that some architectures have instead."""
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = {**_ATTENTION, **_GATED_MLP, **_NORMS}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_FIELDS = {
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")
}
_SHARED_EXPERTS = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_SHARED_EXPERT = {
    name: module.replace("experts", "expert") for name, module in _SHARED_EXPERTS.items()
}
_SHARED_EXPERT_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_SHARED_EXPERT_GATE = {"ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight"}
_EXPERT_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
_RENORMALIZES = {"expert_weights_norm": "norm_topk_prob"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_DELTA_NET_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_out": "linear_attn.out_proj",
}
_PLAIN_RATES = {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
_DELTA_NET_VECTORS = {
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_DELTA_NET_CONVOLUTIONS = {"ssm_conv1d.weight": "linear_attn.conv1d.weight"}
_DELTA_NET_DECAYS = {"ssm_a": "linear_attn.A_log"}


def _without(fields: Mapping[str, str], *keys: str) -> dict[str, str]:
    return {key: name for key, name in fields.items() if key not in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp in Transformers' terms."""

    model_type: str
    name: str  # in config.json's `architectures`
    fields: Mapping[str, str]  # fields of config.json by metadata key, without the architecture
    constants: Mapping[str, Any] = field(default_factory=dict)  # other fields of config.json
    biases: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that are true if the first layer has a tensor of that name."""
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layer_name: str = _LAYER
    layer: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    """Modules of a layer. `{head}`, `{q,k,v}` and `{expert}`: their tensors are stored in one."""
    vectors: Mapping[str, str] = field(default_factory=dict)
    """Vectors of a layer that no module has, by complete names."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Matrices of a layer with one row, stored as vectors, by complete names."""
    convolutions: Mapping[str, str] = field(default_factory=dict)
    """Convolutions of each channel [channels, width], by complete names. The others' have
    [channels, 1, width]."""
    decays: Mapping[str, str] = field(default_factory=dict)
    """Vectors of a layer that are stored as -exp of what the others have, by complete names."""
    has_value_heads_in_turn: bool = False
    """Delta nets have the first value head of each key head, then the second ones."""
    has_pairs: bool = False
    """Rows of queries and keys are ordered to rotate adjacent pairs, not halves of a head."""
    norm_offset: float = 0.0  # added to the weights of norms
    gating: int = SOFTMAX  # of the scores of experts
    with_experts: Architecture | None = None  # if metadata has a number of experts

    @property
    def has_experts(self) -> bool:
        return "expert_count" in self.fields

    @property
    def has_delta_nets(self) -> bool:
        return "ssm.state_size" in self.fields


_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_LLAMA_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        name="LlamaForCausalLM",
        fields=_FIELDS | _RMS,
        biases=_LLAMA_BIASES,
        has_pairs=True,
        with_experts=Architecture(
            model_type="mixtral",
            name="MixtralForCausalLM",
            fields=_FIELDS
            | _RMS
            | _WINDOW
            | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            layer=_ATTENTION
            | _NORMS
            | {
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
            },
            has_pairs=True,
        ),
    ),
    "exaone": Architecture(
        model_type="llama", name="LlamaForCausalLM", fields=_FIELDS | _RMS, biases=_LLAMA_BIASES
    ),
    "qwen2": Architecture(model_type="qwen2", name="Qwen2ForCausalLM", fields=_FIELDS | _RMS),
    "qwen3": Architecture(
        model_type="qwen3",
        name="Qwen3ForCausalLM",
        fields=_FIELDS | _RMS,
        biases=_ATTENTION_BIAS,
        layer=_LLAMA | _HEAD_NORMS,
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        name="Qwen2MoeForCausalLM",
        fields=_FIELDS | _RMS | _EXPERT_COUNTS | _EXPERT_SIZE | _RENORMALIZES | _SHARED_EXPERT_SIZE,
        constants={"norm_topk_prob": False},
        biases={"qkv_bias": "attn_q.bias"},
        layer=_LLAMA | _EXPERTS | _SHARED_EXPERT,
        rows=_SHARED_EXPERT_GATE,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        name="Qwen3MoeForCausalLM",
        fields=_FIELDS | _RMS | _EXPERT_COUNTS | _EXPERT_SIZE | _RENORMALIZES,
        constants={"norm_topk_prob": True},
        biases=_ATTENTION_BIAS,
        layer=_LLAMA | _HEAD_NORMS | _EXPERTS,
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        name="Qwen3NextForCausalLM",
        fields=_FIELDS
        | _RMS
        | _EXPERT_COUNTS
        | _EXPERT_SIZE
        | _SHARED_EXPERT_SIZE
        | _RENORMALIZES
        | _DELTA_NET_FIELDS,
        layer=_ATTENTION
        | _NORM_AFTER_ATTENTION
        | _HEAD_NORMS
        | _EXPERTS
        | _SHARED_EXPERT
        | _DELTA_NET
        | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
        vectors=_DELTA_NET_VECTORS,
        rows=_SHARED_EXPERT_GATE,
        convolutions=_DELTA_NET_CONVOLUTIONS,
        decays=_DELTA_NET_DECAYS,
        norm_offset=1.0,
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        name="Qwen3_5ForCausalLM",
        fields=_FIELDS | _RMS | _DELTA_NET_FIELDS,
        layer=_ATTENTION
        | _NORM_AFTER_ATTENTION
        | _HEAD_NORMS
        | _GATED_MLP
        | _DELTA_NET
        | _PLAIN_RATES,
        vectors=_DELTA_NET_VECTORS,
        convolutions=_DELTA_NET_CONVOLUTIONS,
        decays=_DELTA_NET_DECAYS,
        has_value_heads_in_turn=True,
        norm_offset=1.0,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        name="Qwen3_5MoeForCausalLM",
        fields=_FIELDS
        | _RMS
        | _EXPERT_COUNTS
        | _EXPERT_SIZE
        | _SHARED_EXPERT_SIZE
        | _DELTA_NET_FIELDS,
        constants={"are_stacked": False},
        layer=_ATTENTION
        | _NORM_AFTER_ATTENTION
        | _HEAD_NORMS
        | _EXPERTS
        | _SHARED_EXPERT
        | _DELTA_NET
        | _PLAIN_RATES,
        vectors=_DELTA_NET_VECTORS,
        rows=_SHARED_EXPERT_GATE,
        convolutions=_DELTA_NET_CONVOLUTIONS,
        decays=_DELTA_NET_DECAYS,
        has_value_heads_in_turn=True,
        norm_offset=1.0,
    ),
    "gemma": Architecture(
        model_type="gemma",
        name="GemmaForCausalLM",
        fields=_FIELDS | _RMS,
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        norm_offset=1.0,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        name="Gemma2ForCausalLM",
        fields=_FIELDS
        | _RMS
        | _WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        layer=_LLAMA | _FOUR_NORMS,
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        name="Gemma3ForCausalLM",
        fields=_FIELDS
        | _RMS
        | _WINDOW
        | {
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        layer=_LLAMA | _HEAD_NORMS | _FOUR_NORMS,
        norm_offset=1.0,
    ),
    "phi2": Architecture(
        model_type="phi",
        name="PhiForCausalLM",
        fields=_FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        top=_TOP | {"output_norm": "model.final_layernorm"},
        layer=_ATTENTION
        | {
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "phi3": Architecture(
        model_type="phi3",
        name="Phi3ForCausalLM",
        fields=_FIELDS | _RMS | _WINDOW,
        layer=_NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "starcoder": Architecture(
        model_type="gpt_bigcode",
        name="GPTBigCodeForCausalLM",
        fields=_GPT2_FIELDS | {"attention.head_count_kv": "num_key_value_heads"},
        top=_GPT2_TOP,
        layer_name="transformer.h.{}.",
        layer=_GPT2_LAYER,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        name="Starcoder2ForCausalLM",
        fields=_FIELDS | _WINDOW | {"attention.layer_norm_epsilon": "norm_epsilon"},
        biases={"use_bias": "attn_q.bias"},
        layer=_ATTENTION | _NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        name="GPT2LMHeadModel",
        fields=_GPT2_FIELDS,
        constants={"has_linear_layout": True},
        top=_GPT2_TOP,
        layer_name="transformer.h.{}.",
        layer=_GPT2_LAYER,
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        name="GPTNeoXForCausalLM",
        fields=_FIELDS
        | {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        constants={"has_separate_qkv": True},
        biases={"attention_bias": "attn_qkv.bias"},
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
        },
        layer_name="gpt_neox.layers.{}.",
        layer=_NORMS
        | {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
    "falcon": Architecture(
        model_type="falcon",
        name="FalconForCausalLM",
        fields=_without(_FIELDS, "attention.key_length")
        | {
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_kv_heads",
        },
        constants={"has_separate_qkv": True, "new_decoder_architecture": True},
        biases={"bias": "attn_qkv.bias"},
        top={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer_name="transformer.h.{}.",
        layer={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
    "olmo": Architecture(
        model_type="olmo",
        name="OlmoForCausalLM",
        fields=_FIELDS | {"attention.clamp_kqv": "clip_qkv"},
        layer=_ATTENTION | _GATED_MLP,
        has_pairs=True,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        name="Olmo2ForCausalLM",
        fields=_FIELDS | _RMS,
        layer=_ATTENTION | _GATED_MLP | _HEAD_NORMS | _NORMS_AFTER,
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        name="OlmoeForCausalLM",
        fields=_FIELDS
        | _RMS
        | _EXPERT_COUNTS
        | _RENORMALIZES
        | {"attention.clamp_kqv": "clip_qkv"},
        constants={"norm_topk_prob": False},
        biases=_ATTENTION_BIAS,
        layer=_LLAMA | _HEAD_NORMS | _EXPERTS,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        name="Lfm2ForCausalLM",
        fields=_FIELDS
        | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        constants={"block_auto_adjust_ff_dim": False},
        top=_TOP | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
        layer=_ATTENTION
        | {
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        convolutions={"shortconv.conv.weight": "conv.conv.weight"},
    ),
    "stablelm": Architecture(
        model_type="stablelm",
        name="StableLmForCausalLM",
        fields=_FIELDS
        | {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        biases={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        layer=_LLAMA
        | {
            "attn_q_norm": "self_attn.q_layernorm.norms.{head}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{head}",
        },
    ),
    "command-r": Architecture(
        model_type="cohere",
        name="CohereForCausalLM",
        fields=_FIELDS
        | {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        biases={"use_qk_norm": "attn_q_norm.weight", **_ATTENTION_BIAS},
        layer=_LLAMA | _HEAD_NORMS,
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        name="Cohere2ForCausalLM",
        fields=_without(_FIELDS, "attention.key_length")
        | _WINDOW
        | {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        biases=_ATTENTION_BIAS,
    ),
    "granite": Architecture(
        model_type="granite",
        name="GraniteForCausalLM",
        fields=_FIELDS
        | _RMS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        biases=_LLAMA_BIASES,
        has_pairs=True,
    ),
    "exaone4": Architecture(
        model_type="exaone4",
        name="Exaone4ForCausalLM",
        fields=_FIELDS | _RMS | _WINDOW,
        layer=_ATTENTION | _GATED_MLP | _HEAD_NORMS | _NORMS_AFTER,
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        name="SmolLM3ForCausalLM",
        fields=_FIELDS | _RMS,
        biases=_LLAMA_BIASES,
        has_pairs=True,
    ),
    "nemotron": Architecture(
        model_type="nemotron",
        name="NemotronForCausalLM",
        fields=_FIELDS | {"attention.layer_norm_epsilon": "norm_eps"},
        biases=_LLAMA_BIASES,
        norm_offset=1.0,
    ),
    "arcee": Architecture(
        model_type="arcee",
        name="ArceeForCausalLM",
        fields=_FIELDS | _RMS,
        biases=_LLAMA_BIASES,
        has_pairs=True,
    ),
    "chatglm": Architecture(
        model_type="glm",
        name="GlmForCausalLM",
        fields=_FIELDS | _RMS,
        biases={"attention_bias": "attn_qkv.bias"},
        layer=_LLAMA | {"attn_qkv": "self_attn.{q,k,v}_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "glm4": Architecture(
        model_type="glm4",
        name="Glm4ForCausalLM",
        fields=_FIELDS | _RMS,
        biases=_ATTENTION_BIAS,
        layer=_LLAMA
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        name="Glm4MoeForCausalLM",
        fields=_FIELDS
        | _RMS
        | _EXPERT_SIZE
        | _RENORMALIZES
        | {
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        constants={"norm_topk_prob": False, "first_k_dense_replace": 0},
        biases={**_ATTENTION_BIAS, "use_qk_norm": "attn_q_norm.weight"},
        layer=_ATTENTION
        | _GATED_MLP
        | _HEAD_NORMS
        | _NORM_AFTER_ATTENTION
        | _EXPERTS
        | _SHARED_EXPERTS,
        vectors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        gating=SIGMOID,
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5",
        name="Ernie4_5ForCausalLM",
        fields=_FIELDS | _RMS,
        biases={"use_bias": "attn_q.bias"},
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        name="Ernie4_5_MoeForCausalLM",
        fields=_FIELDS
        | _RMS
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        constants={"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        biases={"use_bias": "attn_q.bias"},
        layer=_LLAMA | _EXPERTS | _SHARED_EXPERTS,
        rows={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        name="SeedOssForCausalLM",
        fields=_FIELDS | _RMS,
        biases={**_LLAMA_BIASES, "attention_out_bias": "attn_output.bias"},
        layer=_LLAMA | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        name="GptOssForCausalLM",
        fields=_FIELDS
        | _RMS
        | _WINDOW
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        constants={"has_separate_experts": True},
        biases=_ATTENTION_BIAS,
        layer=_ATTENTION | _NORM_AFTER_ATTENTION | _EXPERTS | {"ffn_gate_inp": "mlp.router"},
        vectors={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense",
        name="HunYuanDenseV1ForCausalLM",
        fields=_FIELDS | _RMS,
        biases=_ATTENTION_BIAS,
        layer=_LLAMA
        | {
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "mistral3": Architecture(
        model_type="ministral3",
        name="Ministral3ForCausalLM",
        fields=_FIELDS | _RMS,
        has_pairs=True,
    ),
}
"""By `general.architecture`."""
