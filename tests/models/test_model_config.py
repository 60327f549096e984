"""config.json in many variants, with old spellings and gaps, is parsed as by Transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.checkpoints import ARCHITECTURES, edit_json
from toolkit.errors import CheckpointError
from toolkit.models.build import load_config
from toolkit.models.config.registry import describe, model_types, parse_config

HEADS = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}
ENCODERS = ("bert", "roberta", "xlm-roberta")
READ = {
    "gpt2": (
        "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner",
        "activation_function", "layer_norm_epsilon", "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx", "add_cross_attention", "tie_word_embeddings",
        "hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    ),
    "llama": (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias",
    ),
}  # fmt: skip
READ["mistral"] = (*READ["llama"][:-2], "sliding_window")
READ["qwen2"] = (*READ["mistral"], "layer_types")
READ["qwen3"] = (*READ["qwen2"], "attention_bias")
for kind in ENCODERS:
    READ[kind] = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "hidden_act", "max_position_embeddings", "type_vocab_size",
        "layer_norm_eps", "pad_token_id", "is_decoder", "num_labels",
    )  # fmt: skip
"""Attributes that each kind of model reads, except head_dim, which may be missing."""

YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LONGROPE = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}

GPT2: list[dict] = [
    {},
    {"n_embd": 96, "n_head": 3, "n_layer": 5, "n_positions": 77, "n_inner": 100, "vocab_size": 11},
    {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_hidden_layers": 5,
        "max_position_embeddings": 77,
    },
    {"hidden_size": 96, "n_embd": 48},
    {
        "n_inner": None,
        "n_ctx": 1024,
        "task_specific_params": {"text-generation": {"do_sample": True}},
    },
    {
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    {"activation_function": "gelu", "layer_norm_epsilon": 1e-6, "add_cross_attention": True},
]
DECODER: list[dict] = [
    {},
    {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6,
        "num_hidden_layers": 3, "vocab_size": 300,
    },
    {"num_key_value_heads": 2, "intermediate_size": 99, "hidden_act": "gelu", "rms_norm_eps": 1e-5},
    {"head_dim": 64},
    {"tie_word_embeddings": True, "max_position_embeddings": 9999},
    {"rope_theta": 500000.0},
    {"rope_theta": 1000000},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 1e4},
    {
        "rope_parameters": {
            "rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_type": "proportional"
        }
    },
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": {}, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": {"type": "yarn", **YARN}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 2000},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 256}},
    {"rope_parameters": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 256},
    {"rope_scaling": {"type": "longrope", **LONGROPE}, "original_max_position_embeddings": 512},
    {"rope_scaling": {"type": "longrope", **LONGROPE}},
]  # fmt: skip
WINDOWS: list[dict] = [
    {"sliding_window": 128},
    {"sliding_window": None},
    {
        "sliding_window": 128,
        "use_sliding_window": True,
        "max_window_layers": 3,
        "num_hidden_layers": 5,
    },
    {
        "sliding_window": 128,
        "use_sliding_window": True,
        "max_window_layers": 9,
        "num_hidden_layers": 5,
    },
    {
        "sliding_window": 128,
        "use_sliding_window": False,
        "max_window_layers": 3,
        "num_hidden_layers": 5,
    },
    {
        "sliding_window": None,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "num_hidden_layers": 5,
    },
    {"use_sliding_window": True, "num_hidden_layers": 40},
]
ENCODER: list[dict] = [
    {},
    {
        "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 99,
        "num_hidden_layers": 3, "vocab_size": 300,
    },
    {
        "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 3,
        "layer_norm_eps": 1e-5, "hidden_act": "relu",
    },
    {"is_decoder": True},
    {"id2label": {"0": "LABEL_0"}},
    {"id2label": {"0": "a", "1": "b", "2": "c"}},
    {"num_labels": 5},
]  # fmt: skip
LAYER_TYPES: list[dict] = [
    {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    {
        "num_hidden_layers": 2,
        "layer_types": ["attention", "full_attention"],
        "use_sliding_window": True,
    },
]
DTYPES: list[dict] = [
    {"dtype": "bfloat16"},
    {"torch_dtype": "float16"},
    {"torch_dtype": "float32", "dtype": "float16"},
    {"torch_dtype": None},
    {"dtype": None, "torch_dtype": "bfloat16"},
]

SU = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
PHI4 = {"short_factor": [1.0] * 36, "long_factor": [4.0] * 36}
PHI_MOE = {"original_max_position_embeddings": 4096, "short_mscale": 1.2, "long_mscale": 1.3}
WITH_ALPHA = {"alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32, "beta_slow": 1}
MINIMAX = {
    "attn_type_list": [1] * 5, "scoring_func": "sigmoid", "use_routing_bias": True,
    "shared_moe_mode": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer",
    "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1,
    "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192,
}  # fmt: skip
PUBLISHED_QWEN35 = {
    "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_hidden_layers": 8,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
OLD_SPELLINGS: list[tuple[str, dict]] = [
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": 5e4}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    (
        "gemma3_text",
        {
            "sliding_window_pattern": 2,
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    ),
    ("phi", {"partial_rotary_factor": 0.4, "rope_theta": 5e4, "rope_scaling": None}),
    *(
        ("phi3", {"rope_scaling": {"type": kind, **SU}, "max_position_embeddings": 131072})
        for kind in ("longrope", "yarn")
    ),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", **PHI4},
            "partial_rotary_factor": 0.75,
            "rope_theta": 5e4,
            "original_max_position_embeddings": 2048,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
    ),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 5e4}),
    ("gpt_neox", {"rotary_pct": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("olmo", {"rope_theta": 5e4, "rope_scaling": None, "clip_qkv": 8.0}),
    ("olmo2", {"rope_theta": 5e5, "rope_scaling": None}),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}}),
    ("smollm3", {"rope_theta": 5e6, "no_rope_layers": [1, 0, 1, 1, 0], "max_window_layers": 28}),
    (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 1, 0], "sliding_window": 64, "use_sliding_window": True},
    ),
    ("granite", {"rope_theta": 5e6, "embedding_multiplier": 12, "logits_scaling": 8}),
    ("cohere", {"rope_theta": 8e6, "use_qk_norm": True}),
    (
        "cohere2",
        {"rope_theta": 5e4, "sliding_window_pattern": 2, "rotary_pct": 1.0, "layer_switch": 4},
    ),
    ("glm", {"rope_theta": 5e4, "partial_rotary_factor": 0.25}),
    ("glm4", {"rope_theta": 5e4, "partial_rotary_factor": 0.25}),
    ("stablelm", {"rope_theta": 5e4, "partial_rotary_factor": 0.5, "rope_scaling": None}),
    ("starcoder2", {"rope_theta": 5e4, "mlp_type": "default", "sliding_window": 64}),
    ("qwen3_5_text", PUBLISHED_QWEN35),
    ("seed_oss", {"rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}}),
    ("ernie4_5", {"rope_theta": 5e4, "use_rmsnorm": True}),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", **WITH_ALPHA}, "head_dim": 128}),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    (
        "ministral3",
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "llama_4_scaling_beta": 0.2, **YARN}},
    ),
    ("falcon", {"rope_theta": 5e4, "apply_residual_connection_post_layernorm": False}),
    ("nemotron", {"rope_theta": 5e4, "partial_rotary_factor": 0.25, "kv_channels": 128}),
    (
        "phimoe",
        {
            "rope_scaling": {"type": "longrope", **LONGROPE, **PHI_MOE},
            "original_max_position_embeddings": 4096,
            "sliding_window": 131072,
        },
    ),
    ("minimax_m2", {"rotary_dim": 64, "rope_theta": 5e6, **MINIMAX}),
    ("opt", {"word_embed_proj_dim": 768, "prefix": "</s>", "_remove_final_layer_norm": False}),
]

VARIANTS: list[tuple[str, dict]] = [
    *(("gpt2", keys) for keys in GPT2),
    *((kind, keys) for kind in ("llama", "mistral", "qwen2", "qwen3") for keys in DECODER),
    *((kind, {"attention_bias": True}) for kind in ("llama", "qwen2", "qwen3")),
    ("llama", {"mlp_bias": True}),
    *(
        (kind, {"num_key_value_heads": None, "num_attention_heads": 16})
        for kind in ("llama", "qwen2", "qwen3")
    ),
    *(("mistral", keys) for keys in WINDOWS[:2]),
    *((kind, keys) for kind in ("qwen2", "qwen3") for keys in WINDOWS + LAYER_TYPES),
    *((kind, keys) for kind in ENCODERS for keys in ENCODER),
    ("mistral", LAYER_TYPES[0] | {"sliding_window": 128}),
    *((kind, keys) for kind in HEADS for keys in DTYPES),
]


def architecture(kind: str) -> str:
    """Return the first architecture of a kind of model."""
    return import_module(f"toolkit.models.architectures.{kind.replace('-', '_')}").ARCHITECTURES[0]


def write(folder: Path, kind: str, keys: dict) -> Path:
    content = {"architectures": [HEADS[kind]], "model_type": kind} | keys
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def assert_same(folder: Path, kind: str) -> None:
    from transformers import AutoConfig

    ours, theirs = load_config(folder), AutoConfig.from_pretrained(folder)
    if kind not in ("gpt2", *ENCODERS):
        theirs.standardize_rope_params()  # as its rope scalings do
        size = theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or size)
    for name in READ[kind]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (getattr(torch, ours.dtype) if ours.dtype else None) == theirs.dtype
    assert ours.architectures == theirs.architectures


@pytest.mark.parametrize(("kind", "keys"), VARIANTS, ids=lambda value: json.dumps(value)[:60])
def test_parsed_attributes_equal_transformers(tmp_path, kind, keys):
    if (
        kind == "qwen3"
        and keys.get("rope_scaling", {}) is not None
        and "longrope" in json.dumps(keys)
    ):
        keys = keys | {"head_dim": 128}
    assert_same(write(tmp_path, kind, keys), kind)


@pytest.mark.parametrize(
    "name", [name for name in ARCHITECTURES if ARCHITECTURES[name][0].lower() in READ]
)
def test_configs_written_by_transformers(checkpoint, name):
    folder = checkpoint(name)
    assert_same(folder, json.loads((folder / "config.json").read_text())["model_type"])


def test_all_kinds_are_tested():
    assert {kind for kind, _ in VARIANTS} == set(READ)
    assert {kind.replace("-", "_") for kind in READ} <= set(model_types())


@pytest.mark.parametrize(("kind", "keys"), OLD_SPELLINGS, ids=lambda value: json.dumps(value)[:60])
def test_old_spellings_are_described_as_the_new(tmp_path, kind, keys):
    """Old spellings mean the config that Transformers writes after it has read them."""

    from transformers import AutoConfig

    named = {"model_type": kind, "architectures": [architecture(kind)], "num_hidden_layers": 5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(named | keys))
    old = load_config(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert describe(old) == describe(load_config(tmp_path))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (
            "phi3",
            {"rope_scaling": {"type": "su", **SU}},
            {"rope_scaling": {"rope_type": "longrope", **SU}},
        ),
        ("nemotron", {"rope_percent": 0.25}, {"partial_rotary_factor": 0.25}),
        ("cohere2", {"_sliding_window_pattern": 2}, {"sliding_window_pattern": 2}),
    ],
)
def test_spellings_that_transformers_no_longer_reads(kind, old, new):
    named = {"model_type": kind, "architectures": [architecture(kind)]}
    a, b = (parse_config(named | keys) for keys in (old, new))
    for config in (a, b):
        config.rope_parameters.pop("type", None)
    assert describe(a) == describe(b)
    assert describe(a) != describe(parse_config(named))


NOT_EQUAL = {"model_type", "architectures", "rope_scaling", "id2label", "per_layer_config"}
"""Fields of ours that have no equal: names, old spellings, labels that are only counted, objects.
"""


@pytest.mark.parametrize("kind", model_types())
def test_default_configs_are_those_of_transformers(kind, tmp_path):
    """Configs with the fields that Transformers writes, and with none."""

    from transformers import CONFIG_MAPPING

    kind = kind.replace("xlm_roberta", "xlm-roberta")
    named = {"model_type": kind, "architectures": [architecture(kind)]}
    theirs = CONFIG_MAPPING[kind](architectures=named["architectures"])
    theirs.save_pretrained(tmp_path)
    written = parse_config(json.loads((tmp_path / "config.json").read_text()))
    bare = parse_config(named)
    assert describe(bare) == describe(written)
    theirs.allow_global_per_layer_attribute_access = True
    for name in set(written.__struct_fields__) - NOT_EQUAL:
        value = getattr(theirs, name, None)
        if (name, value) == ("sliding_window", 0):  # no window
            assert not getattr(written, name)
        elif value is not None:
            assert getattr(written, name) == value, name


@pytest.mark.parametrize(
    ("kind", "keys", "is_known"),
    [
        ("llama", {"new_feature": 0.5}, False),
        ("llama", {"new_feature": {"a": 1}}, False),
        ("llama", {"new_feature": False, "other": None, "more": [], "size": 0}, True),
        ("llama", {"_new_feature": 1, "hidden_dropout": 0.1, "image_token_id": 7}, True),
        ("llama", {"sliding_window": 64}, False),
        ("llama", {"sliding_window": 64, "use_sliding_window": False}, True),
        ("mistral", {"attention_bias": True}, False),
        ("olmo2", {"clip_qkv": 8.0}, False),
        ("gpt2", {"reorder_and_upcast_attn": True, "n_ctx": 9, "summary_type": "cls_index"}, True),
        ("cohere2", {"use_parallel_block": True, "position_embedding_type": "rope_gptj"}, True),
        ("cohere2", {"use_parallel_block": False}, False),
        ("cohere2", {"position_embedding_type": "alibi"}, False),
        ("qwen2", {"is_causal": False}, False),
        ("phimoe", {"router_jitter_noise": 0.02}, False),
        ("phimoe", {"num_experts_per_tok": 3}, False),
        ("minimax_m2", {"scoring_func": "softmax"}, False),
        ("minimax_m2", {"attn_type_list": [1, 0]}, False),
        ("bert", {"pooler_type": "first_token_transform", "directionality": "bidi"}, True),
    ],
)
def test_fields_that_could_change_the_result_are_refused(kind, keys, is_known):
    raw = {"model_type": kind, "architectures": [architecture(kind)]} | keys
    if is_known:
        parse_config(raw)
        return
    with pytest.raises(ValueError, match=next(iter(keys))) as caught:
        parse_config(raw)
    assert json.dumps(next(iter(keys.values()))) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "word"),
    [({"hidden_act": "snake"}, "snake"), ({"rope_scaling": {"type": "linear"}}, "factor")],
)
def test_description_refuses_what_cannot_be_built(keys, word):
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | keys
    with pytest.raises(CheckpointError, match=word):
        describe(parse_config(raw))


class TestUnusable:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write(tmp_path, "llama", {})

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"hidden_size": "many"}, ["`int`", "`str`", "hidden_size"]),
            ({"hidden_size": 0}, [">= 1", "hidden_size"]),
            (
                {"hidden_size": 100, "num_attention_heads": 7, "num_key_value_heads": 7},
                ["100", "not a multiple", "7"],
            ),
            ({"model_type": "gpt2", "n_embd": 31, "n_head": 2}, ["31", "not a multiple", "2"]),
            (
                {"model_type": "bert", "hidden_size": 31, "num_attention_heads": 2},
                ["31", "not a multiple", "2"],
            ),
            ({"num_attention_heads": 8, "num_key_value_heads": 3}, ["8", "not a multiple", "3"]),
            (
                {"model_type": "gpt_oss", "architectures": ["GptOssModel"], "swiglu_limit": -1.0},
                ["swiglu_limit must be positive", "-1"],
            ),
            ({"rope_scaling": "linear"}, ["`str`", "rope_scaling"]),
            (
                {"model_type": "mistral", "num_hidden_layers": 2, "layer_types": ["attention"]},
                ["1 entries for 2 layers"],
            ),
            (
                {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked"]},
                ["chunked"],
            ),
            ({"model_type": "lama"}, ["'lama'", "LlamaForCausalLM", "architectures.md"]),
            ({"model_type": None}, ["unsupported", "LlamaForCausalLM"]),
            ({"architectures": ["LlamaForVision"]}, ["'LlamaForVision'", "Qwen3ForCausalLM"]),
        ],
    )  # fmt: skip
    def test_unusable_config_is_named_with_the_reason(self, folder, keys, words):
        edit_json(folder / "config.json", **keys)
        if keys.get("model_type") in HEADS:
            edit_json(folder / "config.json", architectures=[HEADS[keys["model_type"]]])
        with pytest.raises(CheckpointError) as caught:
            describe(load_config(folder))
        for word in (str(folder / "config.json"), *words):
            assert word in caught.value.message
        assert "\n" not in caught.value.message


def test_core_imports_neither_transformers_nor_torch_dynamo(checkpoint):
    """Importing either takes seconds."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import toolkit.engine.cores.core_process\n"
        "from toolkit.config import DeviceConfig, EngineConfig\n"
        "from toolkit.worker.worker import Worker\n"
        "config = EngineConfig(device=DeviceConfig(device='cpu'))\n"
        "heavy = {'transformers', 'tokenizers', 'safetensors', 'torch._dynamo'}\n"
        "for folder in sys.argv[1:]:\n"
        "    info = Worker(config, Path(folder)).start(lambda phase, seconds: None)\n"
        "    print(info.dtype, sorted(heavy & set(sys.modules)))\n"
    )
    folders = [str(checkpoint(name)) for name in ("gpt2", "llama-rope-yarn", "qwen3")]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "float32 []\n" * 3


def test_fields_of_embedding_models_are_known():
    raw = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}
    pooling = {
        "is_matryoshka": True,
        "matryoshka_dimensions": [64],
        "sentence_transformers": {"a": 1},
    }
    assert describe(parse_config(raw | pooling)) == describe(parse_config(raw))
