"""Create model folders for `--load-format dummy`: `python -m tools.bench.models OUT_DIR [NAME...]`.

With `--weights` they have random weights of the config's dtype, with `--int4` in GPTQ's layout.
Each has the config of a well-known model and an untrained byte-level tokenizer of that model's
vocabulary size: every byte, then pairs of letters, then pairs of pairs, so that every id has up to
four characters of text."""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

END = "<|endoftext|>"
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
}
"""preprocessor_config.json, by `model_type`."""

WHISPER_START = 50258
"""Whisper large-v3's token after the end of text, with which transcriptions begin."""
SPEECH: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"translate": 50359, "transcribe": 50360},
    "prev_sot_token_id": 50362,
    "no_timestamps_token_id": 50364,
    "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, 50258, 50358, 50359, 50360, 50361, 50362, 50363],
    "begin_suppress_tokens": [220, 50257],
    "max_initial_timestamp_index": 50,
}
"""generation_config.json of models that hear."""
SPEECH_TOKENS = {
    50257: "<|endoftext|>",
    WHISPER_START: "<|startoftranscript|>",
    50259: "<|en|>",
    50261: "<|de|>",
    50359: "<|translate|>",
    50360: "<|transcribe|>",
    50362: "<|startofprev|>",
    50363: "<|nospeech|>",
    50364: "<|notimestamps|>",
}

SPECIAL_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens of pictures, by the field of the config that has their ids."""

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3.5-9b": {  # its decoder: three gated delta nets to each attention layer
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3.5-35b-a3b": {  # its decoder, too
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "whisper-large-v3": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": 51866,
        "num_mel_bins": 128,
        "d_model": 1280,
        "encoder_layers": 32,
        "decoder_layers": 32,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "is_encoder_decoder": True,
        "decoder_start_token_id": WHISPER_START,
        "eos_token_id": 50257,
        "dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "hidden_act": "silu",
        "attention_bias": True,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "gemma-4-e4b": {  # its decoder
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_kv_shared_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    },
}
CONFIGS["gpt-oss-120b"] = CONFIGS["gpt-oss-20b"] | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
CONFIGS["gemma-4-e2b"] = CONFIGS["gemma-4-e4b"] | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "num_key_value_heads": 1,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "use_double_wide_mlp": True,
}
CONFIGS["llama-3.1-70b"] = CONFIGS["llama-3.1-8b"] | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
"""Configs as published with the models."""


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """Write config, generation config and tokenizer. The last id is the end-of-text token."""
    folder.mkdir(parents=True, exist_ok=True)
    end = config.get("eos_token_id", config["vocab_size"] - 1)
    ends = {"bos_token_id": end, "eos_token_id": end}
    contexts = ("n_positions", "max_position_embeddings", "max_target_positions")
    context = next((config[name] for name in contexts if name in config), None)
    hears = config["model_type"] == "whisper"
    _write(folder / "config.json", {**config, **ends})
    _write(folder / "generation_config.json", ends | (SPEECH if hears else {}))
    if (processor := PROCESSORS.get(config["model_type"])) is not None:
        _write(folder / "preprocessor_config.json", processor)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "model_max_length": context,
            "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
            "{% endfor %}assistant:",
        },
    )
    special = {config[field]: name for field, name in SPECIAL_TOKENS.items() if field in config}
    if hears:
        special = SPEECH_TOKENS
    save_tokenizer(folder / "tokenizer.json", config["vocab_size"], special)


def save_weights(folder: Path, shard_size: str = "5GB") -> None:
    """Add random weights in files of up to `shard_size`, created on a GPU if there is one.

    Transformers rewrites the configs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder, max_shard_size=shard_size)


def save_int4_weights(folder: Path, shard_size: str = "5GB") -> None:
    """Add random weights in GPTQ's layout, 4 bits in groups of 128, but for embeddings and head."""
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    packed = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    state: dict[str, torch.Tensor] = {}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        for name, module in packed.items():
            columns, rows = module.in_features, module.out_features
            words = torch.randint(-(2**31), 2**31, (columns // 8, rows), dtype=torch.int32)
            state[f"{name}.qweight"] = words.cpu()
            # 7 is written for 8, which is subtracted from each number.
            state[f"{name}.qzeros"] = torch.full(
                (columns // 128, rows // 8), 0x77777777, dtype=torch.int32
            ).cpu()
            state[f"{name}.scales"] = torch.full((columns // 128, rows), 0.004).half().cpu()
            state[f"{name}.g_idx"] = (torch.arange(columns) // 128).int().cpu()
        for name, weight in model.state_dict().items():
            if name.removesuffix(".weight") not in packed:
                full = torch.ones if weight.dim() == 1 else torch.randn
                state[name] = full(weight.shape, dtype=weight.dtype).cpu()
    save_torch_state_dict(state, folder, max_shard_size=shard_size)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
    }
    _write(folder / "config.json", config)


def save_tokenizer(path: Path, vocab_size: int, special: Mapping[int, str]) -> None:
    """Write a byte-level BPE tokenizer with exactly `vocab_size` ids, including end-of-text.

    special: other special tokens by id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for pair in _pairs(vocab_size - 1 - len(tokens) - len(special)):
        while len(tokens) in special:
            tokens.append(special[len(tokens)])
        merges.append(pair)
        tokens.append("".join(pair))
    tokenizer = Tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [*special.values(), END]
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in names])
    tokenizer.save(str(path), pretty=False)


def _pairs(count: int) -> list[tuple[str, str]]:
    """Return `count` merges: a space or letter with a letter, then pairs of such pairs."""
    letters = string.ascii_lowercase
    pairs = list(itertools.product("Ġ" + letters, letters))  # Ġ is a space in byte-level BPE
    words = ["".join(pair) for pair in pairs]
    inner = [word for word in words if not word.startswith("Ġ")]
    longer = itertools.product(words, inner)
    return [*pairs, *itertools.islice(longer, max(0, count - len(pairs)))][:count]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--weights", action="store_true", help="add random weights; needs names")
    parser.add_argument("--int4", action="store_true", help="add random weights of 4 bits (GPTQ)")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(CONFIGS)}; default: all"
    )
    args = parser.parse_args()
    if (args.weights or args.int4) and not args.names:
        parser.error("--weights and --int4 need names: those of all models together take 160 GB")
    for name in args.names or CONFIGS:
        if name not in CONFIGS:
            parser.error(f"unknown model {name!r}; choose from {', '.join(CONFIGS)}")
        make_model(args.out_dir / name, CONFIGS[name])
        if args.int4:
            save_int4_weights(args.out_dir / name)
        elif args.weights:
            save_weights(args.out_dir / name)
        print(args.out_dir / name)


if __name__ == "__main__":
    main()
