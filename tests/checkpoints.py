"""Small random checkpoints written by Transformers, and Transformers' outputs for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolkit.sampling.params import SamplingParams
from toolkit.sequence import SequenceSpec

VOCAB = 262
"""The bytes, <|endoftext|> <|user|> <|assistant|> <|end|>, and two that only the model has."""
EOS = 256
POSITIONS = 160
NEW_TOKENS = 64  # per answer in the parity tests

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
}


def make_reference(name: str, seed: int = 0) -> torch.nn.Module:
    """Make a Transformers model whose parameters, also biases and norms, are all random.

    A parameter that is not loaded then changes the output.
    """
    family, settings = ARCHITECTURES[name]
    config_class = getattr(transformers, f"{family}Config")
    head = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    ids = {"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": None}
    torch.manual_seed(seed)
    model = getattr(transformers, head)(config_class(**ids, **settings)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
            elif "norm" in parameter_name or "ln_" in parameter_name:
                parameter.normal_(1.0 if parameter_name.endswith("weight") else 0.0, 0.2)
            else:
                parameter.normal_(0.0, 0.2)
    return model


def save(
    model: torch.nn.Module, folder: Path, *, tokenizer: bool = True, **options: object
) -> Path:
    """Save the checkpoint with Transformers, with a byte tokenizer and a chat template."""
    model.save_pretrained(folder, **options)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE without merges: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('no such role') }}{% endif %}"
        "{{ '<|' + ('assistant' if m['role'] == 'assistant' else 'user') + '|>' }}"
        "{{ m['content'] + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return tokenizer


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Generate `count` greedy tokens with Transformers: batch size 1, with cache, no end token."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=VOCAB + 1,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return [len(tokens), vocab] from one uncached Transformers forward."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def spec_of(
    params: SamplingParams, num_prompt_tokens: int = 0, eos_token_ids: Sequence[int] = ()
) -> SequenceSpec:
    return SequenceSpec(
        prompt_token_ids=[0] * num_prompt_tokens,
        params=params,
        max_tokens=1,
        eos_token_ids=list(eos_token_ids),
    )
