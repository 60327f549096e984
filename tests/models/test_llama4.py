"""Llama 4: chunks of attention, published checkpoints, experts with tensors of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.checkpoints import NEW_TOKENS, generate
from tests.models.conftest import Case
from tests.models.test_towers import SETTINGS, renamed
from toolkit import LLM
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.layers import lines_of
from toolkit.models.config.registry import parse_config
from toolkit.models.config.wrapped import text_config

SCOUT = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "cache_implementation": "hybrid",
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "interleave_moe_layer_step": 1,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "output_router_logits": False,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "use_qk_norm": True,
}
"""Fields of text_config in Llama-4-Scout-17B-16E-Instruct, without those of shapes."""
WHOLE = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}


@pytest.fixture(scope="module")
def case(checkpoint: Callable[[str], Path]) -> Case:
    return Case("llama4", checkpoint("llama4"))


def test_chunks_of_attention_end_after_any_token(case: Case) -> None:
    """Prompts of every length around two edges, each cold, then from the prefix cache."""
    start = case.prompts[0]
    text = start + checkpoints.greedy(case.model, start, NEW_TOKENS)
    prompts = [text[:length] for length in range(21, 52)]
    for caching in (False, True):
        llm = case.engine(**SETTINGS, enable_prefix_caching=caching, block_size=4)
        for _ in range(1 + caching):
            found = generate(llm, prompts, max_tokens=3)
        assert all(one.num_cached_tokens for one in found) == caching
        for one in found:
            length = len(one.prompt_token_ids)
            assert list(one.outputs[0].token_ids) == text[length : length + 3], length


def test_published_configs_are_read() -> None:
    raw = {**WHOLE, "text_config": SCOUT, "vision_config": {"model_type": "llama4_vision_model"}}
    config = parse_config(text_config(raw) | {"architectures": ["Llama4ForCausalLM"]})
    assert config.no_rope_layers == [1, 1, 1, 0] * 12
    assert config.layer_types == (["chunked_attention"] * 3 + ["full_attention"]) * 12
    assert config.moe_layers == list(range(48))


def test_chunks_and_scaled_queries_are_shown(case: Case) -> None:
    shown = [line.strip() for line in lines_of(read_folder(case.folder, "m"))]
    [first, _, third] = [line for line in shown if line.startswith("attention: ")]
    assert first.endswith("norm, chunk 24")
    assert third.endswith("queries scaled by position")
    assert "rope" not in third


def inner(name: str) -> str:
    return f"language_model.{name}"


def split(path: Path) -> None:
    """Give each expert tensors of its own, as in quantized checkpoints."""
    file = path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        before, _, kind = name.rpartition(".")
        if not before.endswith(".experts"):
            tensors[name] = tensor
            continue
        for index, one in enumerate(tensor):
            parts = {"down_proj": one.T}
            if kind == "gate_up_proj":
                gate, up = one.T.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, value in parts.items():
                tensors[f"{before}.{index}.{part}.weight"] = value.contiguous()
    save_file(tensors, file, {"format": "pt"})


def test_decoders_next_to_a_tower_and_separate_experts(case: Case, tmp_path: Path) -> None:
    path = renamed(case.folder, tmp_path / "m", inner)
    file = path / "model.safetensors"
    tower = {
        "vision_model.class_embedding": torch.ones(2),
        "multi_modal_projector.x": torch.ones(2),
    }
    save_file(load_file(file) | tower, file, {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw = {**WHOLE, "text_config": raw, "vision_config": {}}
    (path / "config.json").write_text(json.dumps(raw))
    for change in (None, split):
        if change is not None:
            change(path)
        found = generate(LLM(str(path), **SETTINGS), case.prompts[:4], max_tokens=9)
        case.assert_greedy(found, num_tokens=9)


def in_fp8(weight: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in FP8, and scales along an axis."""
    scale = weight.abs().amax(axis, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def test_stacked_experts_in_fp8_equal_the_dequantized_ones(case: Case, tmp_path: Path) -> None:
    """The layout of Llama-4-Maverick-17B-128E-Instruct-FP8: down has its scales transposed."""
    stored, exact = {}, {}
    for name, weight in load_file(case.folder / "model.safetensors").items():
        stored[name] = exact[name] = weight
        is_stack = ".experts." in name
        if is_stack or name.endswith(("q_proj.weight", "shared_expert.up_proj.weight")):
            stored[name], scale = in_fp8(weight, 1)
            exact[name] = stored[name].float() * scale
            stored[f"{name}_scale"] = scale.mT if name.endswith("down_proj") else scale
    found = []
    for kind, tensors in (("stored", stored), ("exact", exact)):
        path = renamed(case.folder, tmp_path / kind, str)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        if kind == "stored":
            skipped = ["k_proj", "v_proj", "o_proj", "router", "layers.0.feed_forward"]
            skipped += ["layers.2.feed_forward", "shared_expert.gate_proj"]
            skipped += ["shared_expert.down_proj", "lm_head"]
            config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": skipped}
            checkpoints.edit_json(path / "config.json", quantization_config=config)
        llm = LLM(str(path), dtype="float32", **SETTINGS)
        found.append(checkpoints.engine_logits(llm, case.prompts[3]))
    torch.testing.assert_close(found[0], found[1])


def test_int8_weights_change_little(case: Case) -> None:
    llm = case.engine(**SETTINGS, quantization="int8")
    prompt, last = case.prompts[-1], slice(-4, None)
    ours, expected = checkpoints.engine_logits(llm, prompt)[last], case.logits(prompt, last)
    assert 0 < (ours - expected).norm() / expected.norm() < 0.1
