"""Models to begin with."""

from __future__ import annotations

import pytest

from toolkit.hardware.devices import Device
from toolkit.inventory import recommended
from toolkit.inventory.checkpoint import Checkpoint
from toolkit.inventory.recommended import MODELS, advice
from toolkit.units import GIB

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
HEADS = {"head_dim": 128, "num_key_value_heads": 8}
CONFIGS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-0.6B": QWEN | HEADS | {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
        "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA | {
        "vocab_size": 128256, "hidden_size": 3072, "num_hidden_layers": 28,
        "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-4B-Instruct-2507": QWEN | HEADS | {
        "vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36,
        "intermediate_size": 9728, "num_attention_heads": 32, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": QWEN | HEADS | {
        "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36,
        "intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B-Instruct-2507": MOE | {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "intermediate_size": 6144, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True,
    },
}  # fmt: skip
"""Published dimensions."""
COMMON = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu"}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_the_parameters_in_bfloat16(name: str):
    checkpoint = Checkpoint(name, COMMON | CONFIGS[name], {"model.safetensors": 1})
    (model,) = [one for one in MODELS if one.name == name]
    assert checkpoint.num_parameters == model.weights // 2


def test_names_without_an_owner_get_models_that_fit(monkeypatch: pytest.MonkeyPatch):
    device = Device("cuda", "NVIDIA L4", 24 * GIB, 12 * GIB)
    monkeypatch.setattr(recommended, "find_device", lambda: device)
    lines = advice("llama3.2").splitlines()
    assert lines[0].startswith(" Models to begin with,")
    assert "on NVIDIA L4, with 12.00 GiB free:" in lines[0]
    fits = {line.split()[0]: line.split()[3] for line in lines[3:]}
    assert list(fits) == [model.name for model in MODELS]
    assert fits["Qwen/Qwen3-4B-Instruct-2507"] == "yes"
    assert fits["Qwen/Qwen3-8B"] == "no"
    assert advice("owner/name") == ""
