"""Logits equal Transformers' with each flag of a config on and off, and with a large epsilon."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import msgspec
import pytest
import torch

from tests import checkpoints
from tests.models.architectures import ARCHITECTURES, OPTIONS, POSITIONS
from tests.references import records
from toolkit import LLM
from toolkit.errors import ConfigError
from toolkit.models import architectures

OFF = {
    "alibi": "refused",
    "are_stacked": "of the tensors: `test_hybrids`",
    "drafts_are_stacked": "of the tensors: `test_mtp_of_hybrids`",
    "attn_logit_softcapping": "refused in Gemma 3",
    "add_cross_attention": "refused",
    "do_layer_norm_before": "refused",
    "has_linear_layout": "of a GGUF file",
    "has_separate_experts": "of the tensors, or of a GGUF file",
    "has_separate_qkv": "of a GGUF file",
    "has_split_inputs": "of a GGUF file",
    "is_causal": "refused",
    "is_wrapped": "not in the file",
    "layer_norm_elementwise_affine": "refused",
    "overflows_float16": "not in config.json",
    "_remove_final_layer_norm": "refused",
    "tie_word_embeddings": "the same code in all",
    "use_bidirectional_attention": "refused",
    "mtp_use_dedicated_embeddings": "drafts only",
    "use_mtp": "drafts only",
    "gpt_bigcode.scale_attn_by_inverse_layer_idx": "refused",
    "gptj.scale_attn_by_inverse_layer_idx": "not read, as in Transformers",
    "gptj.scale_attn_weights": "not read, as in Transformers",
    "granitemoe.mlp_bias": "refused",
    "granitemoeshared.mlp_bias": "refused",
    "olmo_hybrid.is_renamed": "of the tensors: `test_hybrids`",
    "olmo_hybrid.rotates": "rope_parameters has rope_theta, or is null",
    "qwen3_5_moe_text.norm_topk_prob": "not read, as in Transformers",
    "qwen3_moe.qkv_bias": "not read, as in Transformers",
}
"""Flags that need no other value here, also as kind.flag, with the reason."""
PROMPT = [(7 * i * i + 3) % 250 for i in range(30)]


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_with_other_options_equal_transformers(name, tmp_path):
    family, settings = ARCHITECTURES[name]
    model = checkpoints.make_model(family, settings | OPTIONS[name])
    folder = checkpoints.save(model, tmp_path / "model")
    if "use_sliding_window" in OPTIONS[name]:  # which layers have windows is derived
        checkpoints.edit_json(folder / "config.json", layer_types=None)
    llm = LLM(str(folder), device="cpu", max_model_len=POSITIONS)
    last = slice(-4, None)
    ours, expected = checkpoints.engine_logits(llm, PROMPT)[last], model.logits(PROMPT, last)
    assert (ours - expected).norm() / expected.norm() < 1e-4
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_dynamic_rotation_scales_beyond_the_trained_length(tmp_path):
    """Angles are of `max_model_len`, as Transformers' are for a text of that length."""
    model, length = checkpoints.make_reference("llama-rope-dynamic"), 400
    folder = str(checkpoints.save(model, tmp_path / "model"))
    text = [(7 * i * i + 3 * i) % 250 for i in range(length)]
    llm = LLM(folder, device="cpu", max_model_len=length)
    ours = checkpoints.engine_logits(llm, text[:-1])[-4:]
    expected = model.logits(text, slice(-5, -1))
    assert (ours - expected).norm() / expected.norm() < 1e-4
    assert LLM(folder, device="cpu").info.max_model_len == POSITIONS
    with pytest.raises(ConfigError, match=f"at most {4 * POSITIONS} tokens"):
        LLM(folder, device="cpu", max_model_len=4 * POSITIONS + 1)


def recorded_configs(names: tuple[str, ...]) -> list[dict[str, Any]]:
    configs = [one["files"]["config.json"] for one in records().models.values()]
    return [one for one in configs if one["architectures"][0] in names]


@pytest.mark.parametrize("kind", [one.name for one in iter_modules(architectures.__path__)])
def test_each_flag_is_on_and_off_in_a_recorded_model(kind):
    module = import_module(f"{architectures.__name__}.{kind}")
    configs = recorded_configs(module.ARCHITECTURES)
    if not configs:
        # Configs of encoders have no flags; `test_seeing` has the decoder of a larger model.
        assert kind in ("bert", "roberta", "xlm_roberta", "qwen3_vl_moe_text")
        return
    flags = [one for one in msgspec.structs.fields(module.Config) if one.type is bool]
    for flag in flags:
        if not OFF.keys() & {flag.name, f"{kind}.{flag.name}"}:
            values = {one.get(flag.name, flag.default) for one in configs}
            assert len(values) == 2, f"{flag.name} is {values} in all rows"
