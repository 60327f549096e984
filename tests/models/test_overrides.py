"""Fields of config.json that a user overrides, and what the model computes with them."""

from __future__ import annotations

import random
from importlib import import_module

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import VOCAB
from toolkit import LLM
from toolkit.errors import CheckpointError, ConfigError
from toolkit.models.config.overrides import override
from toolkit.models.config.registry import parse_config

YARN_OF_8 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("given", "overrides", "expected"),
    [
        ({"rope_theta": 7.0}, {"rope_scaling": YARN_OF_8}, YARN_OF_8 | {"rope_theta": 7.0}),
        ({"rope_theta": 7.0}, {"rope_parameters": YARN_OF_8}, YARN_OF_8 | {"rope_theta": 7.0}),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
            {"rope_scaling": YARN_OF_8},
            YARN_OF_8 | {"rope_theta": 7.0},
        ),
        (
            {"rope_parameters": YARN_OF_8 | {"rope_theta": 7.0, "beta_fast": 9.0}},
            {"rope_scaling": {"factor": 4.0}},
            YARN_OF_8 | {"rope_theta": 7.0, "beta_fast": 9.0, "factor": 4.0},
        ),
        (
            {"rope_theta": 7.0, "rope_scaling": YARN_OF_8},
            {"rope_scaling": None},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
    ],
)
def test_rope_overrides_keep_the_base(given, overrides, expected):
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | given
    config = parse_config(override(raw, overrides))
    assert config.rope_parameters == expected
    is_extended = expected["rope_type"] == "yarn"
    longest = max(2048, 100 * int(expected.get("factor", 0))) if is_extended else 2048
    assert config.max_positions == longest


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_rope_overrides_change_full_attention_only(kind):
    bare = {
        "model_type": kind,
        "architectures": [import_module(f"toolkit.models.architectures.{kind}").ARCHITECTURES[0]],
    }
    written = bare | {"rope_parameters": parse_config(bare).rope_parameters}
    scaled = [parse_config(override(raw, {"rope_scaling": YARN_OF_8})) for raw in (bare, written)]
    assert scaled[0].rope_parameters == scaled[1].rope_parameters
    assert scaled[0].rope_parameters["full_attention"]["factor"] == 8.0
    assert scaled[0].rope_parameters["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_rope_overrides_are_refused_without_rotation(kind):
    raw = {
        "model_type": kind,
        "architectures": [import_module(f"toolkit.models.architectures.{kind}").ARCHITECTURES[0]],
    }
    with pytest.raises(ValueError, match="rope_parameters"):
        parse_config(override(raw, {"rope_scaling": YARN_OF_8}))


@pytest.mark.parametrize(
    ("overrides", "word"),
    [({"rope_scaling": 3}, "rope_parameters"), ({"hidden_size": "many"}, "hidden_size")],
)
def test_overrides_of_a_wrong_type_are_refused(overrides, word):
    with pytest.raises(ValueError, match=word):
        parse_config(override({"model_type": "llama", "architectures": ["LlamaModel"]}, overrides))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": YARN},
        {"hf_overrides": {"rope_scaling": YARN}},
        {"rope_scaling": YARN, "hf_overrides": {"rms_norm_eps": 0.1}},
    ],
    ids=str,
)
def test_logits_equal_transformers_with_the_same_overrides(checkpoint, settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = checkpoint("qwen3")
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**YARN, "rope_theta": config.rope_parameters["rope_theta"]}
    config.rms_norm_eps = settings.get("hf_overrides", {}).get("rms_norm_eps", config.rms_norm_eps)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    prompt = [random.Random(0).randrange(VOCAB) for _ in range(390)]
    llm = LLM(str(folder), device="cpu", **settings)
    assert llm.info.max_model_len == 400
    ours, expected = checkpoints.engine_logits(llm, prompt), checkpoints.logits(model, prompt)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_unknown_overrides_are_refused(checkpoint):
    with pytest.raises(CheckpointError, match="rope_scalng: 1"):
        LLM(str(checkpoint("qwen3")), device="cpu", hf_overrides={"rope_scalng": 1})
    with pytest.raises(ConfigError, match="--rope-scaling is not valid JSON"):
        LLM(str(checkpoint("qwen3")), device="cpu", rope_scaling="yarn")
