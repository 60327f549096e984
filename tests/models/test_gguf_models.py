"""A GGUF file gives the model that the original checkpoint gives, for each architecture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints
from tests.models import gguf_models
from tests.models.architectures import ARCHITECTURES
from toolkit.models.build import build_model, load_config
from toolkit.models.config.registry import describe
from toolkit.models.describe import Decoder, Rope
from toolkit.weights.loading.loader import load_weights
from toolkit.weights.source import Source

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt-bigcode": ("starcoder", {}),
    "llama2-mha": ("llama", {}),
    "llama-mqa-tied": ("llama", {}),
    "llama-biases-head-dim": ("llama", {}),
    "llama-rope-linear": ("llama", {}),
    "llama-rope-yarn": ("llama", {}),
    "llama31-rope": ("llama", {}),
    "mistral-no-window": ("llama", {}),
    "mistral-window": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {}),
    "mixtral": ("llama", {}),
    "qwen2-moe": ("qwen2moe", {"norm_topk_prob": False, "decoder_sparse_step": 1}),
    "qwen3-moe": ("qwen3moe", {"mlp_only_layers": []}),
    "olmoe": ("olmoe", {}),
    "glm4-moe": ("glm4moe", {}),
    "ernie4.5-moe": ("ernie4_5-moe", {}),
    "gpt-oss": ("gpt-oss", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 80, "num_hidden_layers": 7, "layer_types": None},
    ),
    "phi": ("phi2", {}),
    "phi3": ("phi3", {}),
    "phi3-short-context": ("phi3", {}),
    "phi4-long-context": ("phi3", {}),
    "gpt-neox": ("gptneox", {}),
    "gpt-neox-sequential": ("gptneox", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo2",
        {
            "attention_bias": False,
            "num_hidden_layers": 4,
            "layer_types": None,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4}
                for kind in ("sliding_attention", "full_attention")
            },
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
    "granite": ("granite", {}),
    "cohere": ("command-r", {}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "layer_types": None}),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "seed-oss": ("seed_oss", {}),
    "ernie4.5": ("ernie4_5", {"use_bias": False}),
    "hunyuan": ("hunyuan-dense", {}),
    "ministral3": (
        "mistral3",
        {
            "sliding_window": None,
            "rope_parameters": ARCHITECTURES["ministral3"][1]["rope_parameters"] | {"mscale": 1.0},
        },
    ),
    "falcon": ("falcon", {}),
    "falcon-one-norm": ("falcon", {}),
    "falcon-multi-query": ("falcon", {}),
    "nemotron": ("nemotron", {}),
    "exaone4": ("exaone4", {"sliding_window_pattern": 4}),
    "arcee": ("arcee", {}),
    "lfm2": ("lfm2", {}),
    "qwen3-next": ("qwen3next", {"mlp_only_layers": []}),
    "qwen3.5": ("qwen35", {}),
    "qwen3.5-moe": ("qwen35moe", {"linear_num_value_heads": 4}),
}
"""Rows of ARCHITECTURES: llama.cpp's name, and changes to what it can express."""


@pytest.mark.parametrize("name", MODELS)
def test_gguf_file_gives_the_model_of_the_checkpoint(name, tmp_path):
    architecture, changes = MODELS[name]
    family, settings = ARCHITECTURES[name]
    reference = checkpoints.make_model(family, settings | changes)
    checkpoints.save(reference, tmp_path / "folder", tokenizer=False)
    file = gguf_models.write_model(tmp_path / "model.gguf", reference, architecture)
    theirs, wanted = load(tmp_path / "folder")
    ours, found = load(file)
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        assert one == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other)
    expected = dict(tensors(theirs))
    for key, tensor in tensors(ours):
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-6, msg=key)


def load(folder: Path) -> tuple[torch.nn.Module, Decoder]:
    config = load_config(folder)
    model = build_model(config, device=torch.device("cpu"), dtype=torch.float32, max_model_len=160)
    load_weights(model, folder, "auto")
    found = describe(config)
    assert isinstance(found, Decoder)
    return model, found


def tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers, which include the tables of rotations."""
    return [*model.named_parameters(), *model.named_buffers()]


def leaves(value: Any) -> list[Any]:
    """Return what a description says, without the places of tensors and parameters of rotations."""
    if isinstance(value, Source):
        return []
    if isinstance(value, Rope):
        return ["rotates"]
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)} - {"name", "q", "k", "embed"}
        names -= {"max_positions", "layers_name", "first"}
        return [leaf for name in sorted(names) for leaf in leaves(getattr(value, name))]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]
