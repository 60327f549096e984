"""Tiny models of every architecture: Transformers' class and the fields of its config.

Every field that changes what the model computes has a value that shows: windows and trained context
lengths are short, multipliers and caps are far from 1, factors differ between dimensions.
"""

from __future__ import annotations

POSITIONS = 160

_ROPE = {"rope_theta": 10000.0}
_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
_MEDIUM = _LLAMA | {"hidden_size": 64, "intermediate_size": 96}
_WIDE = _LLAMA | {"hidden_size": 128, "intermediate_size": 96}
_TWO_HEADS_OF_96 = _LLAMA | {
    "hidden_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_NEOX = {"num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
_HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
    },
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_HYBRID_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
_FALCON = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "max_position_embeddings": POSITIONS,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 4.0,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = _MEDIUM | {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 9,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        _FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
        },
    },
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262,
}
_GEMMA4_LARGE = _GEMMA4 | {
    "num_hidden_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, _FULL],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip

ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": POSITIONS}),
    "gpt2-untied-inverse-scale": (
        "GPT2",
        {
            "n_layer": 3,
            "n_embd": 32,
            "n_head": 2,
            "n_positions": POSITIONS,
            "n_inner": 40,
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "llama2-mha": ("Llama", _LLAMA | {"num_key_value_heads": 4}),
    "llama3-gqa": (
        "Llama",
        _LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama-mqa-tied": ("Llama", _LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases-head-dim": (
        "Llama",
        _LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama-rope-linear": (
        "Llama",
        _LLAMA | {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama-rope-dynamic": (
        "Llama",
        _LLAMA | {"rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "llama-rope-yarn": (
        "Llama",
        _LLAMA
        | {
            "rope_parameters": _ROPE
            | {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": POSITIONS // 4,
            }
        },
    ),
    "llama-rope-longrope": (
        "Llama",
        _LLAMA
        | {
            "rope_parameters": _ROPE
            | {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": POSITIONS,
            }
        },
    ),
    "llama-rope-proportional": (
        "Llama",
        _LLAMA
        | {"rope_parameters": _ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
    ),
    "llama31-rope": (
        "Llama",
        _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": ("Mistral", _LLAMA | {"sliding_window": 9}),
    "mistral-no-window": ("Mistral", _LLAMA | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen2-tied-some-windows": (
        "Qwen2",
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", _LLAMA | {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", _LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma": (
        "Gemma",
        _MEDIUM | {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2",
        _MEDIUM
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "sliding_window": 9,
        },
    ),
    "gemma3": (
        "Gemma3",
        _MEDIUM
        | {
            "num_hidden_layers": 3,
            "head_dim": 80,
            "query_pre_attn_scalar": 40,
            "sliding_window": 9,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
        },
    ),
    "gemma4-dense": ("Gemma4", _GEMMA4_LARGE),
    "gemma4-moe": (
        "Gemma4",
        _GEMMA4_LARGE
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "phi": (  # heads of 80, of which 32 rotate, as in Phi-2
        "Phi",
        _LLAMA
        | {
            "hidden_size": 160,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.4},
        },
    ),
    "phi3": ("Phi3", _TWO_HEADS_OF_96 | {"sliding_window": 20}),
    "phi3-short-context": (  # max_model_len is the trained length: the short factors
        "Phi3",
        _WIDE
        | {
            "max_position_embeddings": 4 * POSITIONS,
            "original_max_position_embeddings": POSITIONS,
            "rope_parameters": _ROPE
            | {
                "rope_type": "longrope",
                "short_factor": [1.0 + i / 9 for i in range(16)],
                "long_factor": [1.0 + i * i / 9 for i in range(16)],
            },
        },
    ),
    "phi4-long-context": (
        "Phi3",
        _WIDE
        | {
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE
            | {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + i / 9 for i in range(12)],
                "long_factor": [1.0 + i * i / 9 for i in range(12)],
            },
        },
    ),
    "gpt-neox": (
        "GPTNeoX",
        _NEOX
        | {
            "hidden_size": 192,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25},
        },
    ),
    "gpt-neox-sequential": (
        "GPTNeoX",
        _NEOX
        | {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "olmo": ("Olmo", _MEDIUM | {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2", _WIDE),
    "olmo3": (
        "Olmo3",
        _MEDIUM
        | {
            "num_hidden_layers": 3,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "sliding_window": 9,
            "attention_bias": True,
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                _FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 5.0,
                    "original_max_position_embeddings": POSITIONS // 5,
                    "beta_fast": 1.5,
                    "beta_slow": 0.25,
                    "attention_factor": 1.3,
                },
            },
        },
    ),
    "smollm3": (
        "SmolLM3",
        _MEDIUM
        | {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-windows": (
        "SmolLM3",
        _WIDE
        | {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "granite": (
        "Granite",
        _MEDIUM | _GRANITE | {"attention_bias": True, "mlp_bias": True},
    ),
    "cohere": (
        "Cohere",
        _MEDIUM | {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "Cohere2",
        _WIDE
        | {
            "num_hidden_layers": 3,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "sliding_window": 9,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "glm": (
        "Glm",
        _MEDIUM
        | {
            "head_dim": 32,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "glm4": (
        "Glm4",
        _MEDIUM
        | {
            "head_dim": 80,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "stablelm": (
        "StableLm",
        _WIDE
        | {
            "use_qkv_bias": True,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25},
        },
    ),
    "stablelm-parallel": (
        "StableLm",
        _WIDE
        | {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "starcoder2": ("Starcoder2", _WIDE | {"sliding_window": 20, "tie_word_embeddings": True}),
    "seed-oss": (
        "SeedOss",
        _MEDIUM | {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4.5": ("Ernie4_5", _MEDIUM | {"head_dim": 32, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        _MEDIUM
        | {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": _ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": (
        "Ministral3",
        _MEDIUM
        | {
            "head_dim": 32,
            "sliding_window": 40,
            "rope_parameters": _ROPE
            | {
                "rope_type": "yarn",
                "factor": 5.0,
                "original_max_position_embeddings": POSITIONS // 5,
                "beta_fast": 1.5,
                "beta_slow": 0.25,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "opt": (
        "OPT",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_dim": 96,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "falcon": (
        "Falcon",
        _FALCON
        | {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-one-norm": (  # as in Falcon 2
        "Falcon",
        _FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-multi-query": (
        "Falcon",
        _FALCON | {"hidden_size": 64, "multi_query": True, "parallel_attn": True},
    ),
    "nemotron": (
        "Nemotron",
        _MEDIUM
        | {
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "gptj": (
        "GPTJ",
        {"n_layer": 2, "n_embd": 64, "n_head": 2, "rotary_dim": 8, "n_positions": POSITIONS},
    ),
    "gpt-bigcode": (
        "GPTBigCode",
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": POSITIONS},
    ),
    "gpt-bigcode-all-heads": (
        "GPTBigCode",
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": POSITIONS, "multi_query": False},
    ),
    "ministral": (
        "Ministral",
        _MEDIUM
        | {
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "helium": ("Helium", _MEDIUM | {"head_dim": 16}),
    "exaone4": (
        "Exaone4",
        _MEDIUM | {"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 2},
    ),
    "arcee": ("Arcee", _MEDIUM | {"attention_bias": True, "mlp_bias": True}),
    "mixtral": (
        "Mixtral",
        _MEDIUM | {"sliding_window": 20, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        _MEDIUM
        | {
            "num_hidden_layers": 3,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        _MEDIUM
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": 24,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        _HYBRID
        | _HYBRID_EXPERTS
        | {"norm_topk_prob": True, "mlp_only_layers": [1], "linear_num_value_heads": 6},
    ),
    "qwen3.5": ("Qwen3_5", _HYBRID),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        _HYBRID | _HYBRID_EXPERTS | {"linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "lfm2": (
        "Lfm2",
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "block_multiple_of": 40,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        _MEDIUM
        | {
            "num_hidden_layers": 4,
            "moe_num_experts": 9,
            "moe_k": 3,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        _MEDIUM
        | {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "llama4": (  # as in Scout: layers with and without rotation; the first has no experts
        "Llama4",
        _MEDIUM
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "attn_scale": 0.7,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        _MEDIUM
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 48,
            "num_local_experts": 10,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": POSITIONS // 4,
            },
        },
    ),
    "olmoe": (
        "Olmoe",
        _MEDIUM
        | {
            "intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "clip_qkv": 0.7,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        _MEDIUM
        | _GRANITE
        | {
            "intermediate_size": 32,
            "attention_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        _MEDIUM
        | _GRANITE
        | {
            "intermediate_size": 16,
            "shared_intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "phimoe": (
        "Phimoe",
        _WIDE
        | {
            "intermediate_size": 32,
            "num_local_experts": 12,
            "attention_bias": True,
            "lm_head_bias": True,
            "max_position_embeddings": 4 * POSITIONS,
            "rope_parameters": _ROPE
            | {
                "rope_type": "longrope",
                "original_max_position_embeddings": POSITIONS,
                "short_factor": [1.0 + i / 9 for i in range(16)],
                "long_factor": [1.0 + i * i / 9 for i in range(16)],
                "short_mscale": 1.3,
                "long_mscale": 1.6,
            },
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        _MEDIUM
        | {
            "head_dim": 32,
            "rope_parameters": _ROPE | {"rope_type": "default", "partial_rotary_factor": 0.375},
            "num_mtp_modules": 1,
            "intermediate_size": 32,
            "num_local_experts": 10,
            "num_experts_per_tok": 3,
        },
    ),
}
"""Name: (prefix of Transformers' classes, fields of the config)."""

_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
_ALL_BIASES = {"attention_bias": True, "mlp_bias": True}
_EPS = {"rms_norm_eps": 0.05}
_LAYER_EPS = {"layer_norm_eps": 0.05}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}

OPTIONS: dict[str, dict] = {
    "arcee": _NO_BIASES | _EPS,
    "cohere": {"attention_bias": True, "use_qk_norm": False} | _LAYER_EPS,
    "cohere2": {"attention_bias": True} | _LAYER_EPS,
    "ernie4.5": {"use_bias": True, "tie_word_embeddings": True} | _EPS,
    "ernie4.5-moe": {"use_bias": True} | _EPS,
    "exaone4": _EPS,
    "falcon-multi-query": {"multi_query": False, "parallel_attn": False, "bias": True},
    "falcon-one-norm": {"layer_norm_epsilon": 0.05},
    "gemma": {"attention_bias": True} | _EPS,
    "gemma2": {"attention_bias": True} | _EPS,
    "gemma3": {"attention_bias": True, "final_logit_softcapping": 2.0} | _EPS,
    "gemma4": {"attention_bias": True, "use_double_wide_mlp": False} | _EPS,
    "glm": {"attention_bias": False} | _EPS,
    "glm4": {"attention_bias": False} | _EPS,
    "glm4-moe": {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False} | _EPS,
    "gpt2": {"scale_attn_weights": False, "layer_norm_epsilon": 0.05},
    "gpt-bigcode": {"scale_attn_weights": False, "layer_norm_epsilon": 0.05},
    "gpt-neox": _LAYER_EPS,
    "gpt-oss": {"attention_bias": False, "swiglu_limit": 0.7, "swiglu_alpha": 1.2} | _EPS,
    "gptj": {"layer_norm_epsilon": 0.05},
    "granite": _NO_BIASES | _EPS,
    "granite-moe": {"attention_bias": False} | _EPS,
    "granite-moe-shared": {"attention_bias": True} | _EPS,
    "helium": _ALL_BIASES | _EPS,
    "hunyuan": {"attention_bias": False} | _EPS,
    "llama-rope-linear": _EPS,
    "llama4": {
        "attention_bias": True,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "moe_layers": [0, 3],
        "num_experts_per_tok": 3,
        "no_rope_layers": [0, 1, 1, 0],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "hidden_act": "gelu",
    } | _EPS,
    "minimax-m2": _EPS,
    "lfm2": {"conv_bias": True, "block_auto_adjust_ff_dim": False, "norm_eps": 0.05},
    "lfm2-moe": {
        "conv_bias": False, "norm_topk_prob": False, "use_expert_bias": False, "norm_eps": 0.05,
    },
    "ministral": _EPS,
    "ministral3": _EPS,
    "mistral-window": _EPS,
    "mixtral": _EPS,
    "nemotron": _NO_BIASES | {"norm_eps": 0.05},
    "olmo": {"attention_bias": True},
    "olmo2": {"attention_bias": True} | _EPS,
    "olmo3": _EPS,
    "olmoe": {"attention_bias": True, "norm_topk_prob": True} | _EPS,
    "opt": {"enable_bias": False},
    "phi": _LAYER_EPS,
    "phi3": {"attention_bias": True} | _EPS,
    "phimoe": {"attention_bias": False, "lm_head_bias": False} | _EPS,
    "qwen2": _EPS,
    "qwen2-moe": {"qkv_bias": False, "norm_topk_prob": False} | _WINDOWS | _EPS,
    "qwen3": {"attention_bias": True} | _WINDOWS | _EPS,
    "qwen3-moe": {"attention_bias": True, "norm_topk_prob": False} | _WINDOWS | _EPS,
    "qwen3-next": {
        "attention_bias": True, "norm_topk_prob": False, "decoder_sparse_step": 2,
    } | _EPS,
    "olmo-hybrid": {
        "attention_bias": True,
        "linear_allow_neg_eigval": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    } | _EPS,
    "qwen3.5": {"attention_bias": True} | _EPS,
    "qwen3.5-moe": {"attention_bias": True} | _EPS,
    "seed-oss": {"attention_out_bias": False, "attention_bias": False, "mlp_bias": False} | _EPS,
    "smollm3": _EPS,
    "stablelm": _LAYER_EPS,
    "starcoder2": {"use_bias": False, "norm_epsilon": 0.05},
}  # fmt: skip
"""Values of flags that no row above has, and an epsilon that shows, by the row that they change."""

SHORTEST_PROMPT = {"phi4-long-context": 33}
"""Transformers chooses LongRoPE's factors by the length so far, tk by `max_model_len`."""

MAX_MODEL_LEN = {"phi3-short-context": POSITIONS, "phimoe": POSITIONS}

WITH_EXPERTS = frozenset(
    {
        *("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "ernie4.5-moe", "glm4-moe", "gpt-oss"),
        *("granite-moe", "granite-moe-shared", "minimax-m2", "phimoe"),
        *("lfm2-moe", "qwen3-next", "qwen3.5-moe", "llama4", "gemma4-moe"),
    }
)
"""Models whose steps CPUs do not record: which kernels they call depends on the numbers."""

WITH_STATES = frozenset({"lfm2", "lfm2-moe", "olmo-hybrid", "qwen3-next", "qwen3.5", "qwen3.5-moe"})
"""Models with a state for each request."""

OVERFLOWS_FP16 = frozenset({"gemma2", "gemma3", "gemma4", "gemma4-dense", "gemma4-moe"})
"""Architectures whose trained models overflow in fp16."""

REFUSED: dict[str, tuple[str, dict, str]] = {
    "opt-350m": (
        "OPT",
        ARCHITECTURES["opt"][1] | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        "do_layer_norm_before|word_embed_proj_dim",
    ),
    "opt-projections": (
        "OPT",
        ARCHITECTURES["opt"][1] | {"word_embed_proj_dim": 32},
        "word_embed_proj_dim",
    ),
    "falcon-alibi": ("Falcon", _FALCON | {"alibi": True}, "alibi"),
    "phi-qk-norm": ("Phi", ARCHITECTURES["phi"][1] | {"qk_layernorm": True}, "qk_layernorm"),
    "gemma4-bidirectional": (
        "Gemma4",
        ARCHITECTURES["gemma4"][1] | {"use_bidirectional_attention": "all"},
        "is_causal",
    ),
    "gemma3-bidirectional": (
        "Gemma3",
        ARCHITECTURES["gemma3"][1] | {"use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
}
"""Variants that are not supported: (prefix, fields, pattern of the field named by the error)."""
