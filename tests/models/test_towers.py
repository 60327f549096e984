"""Checkpoints of models that also see, served as their text decoders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from toolkit import LLM, LoRARequest, SamplingParams
from toolkit.errors import CheckpointError
from toolkit.inventory.checkpoint import read_folder
from toolkit.models.build import load_config
from toolkit.models.config.overrides import override
from toolkit.models.config.registry import parse_config
from toolkit.text.tokenizer import eos_token_ids
from toolkit.weights.names import is_of_tower, text_name, text_pattern

_TEXT = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160,
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_TOWER = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip
_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_IDS = {
    "image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-vl": (
        "Qwen2VL",
        {
            "text_config": _TEXT | {"rope_parameters": _AXES, "tie_word_embeddings": False},
            "vision_config": _QWEN_TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            "tie_word_embeddings": False,
        } | _IDS,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": _TEXT | {"rope_parameters": _AXES},
            "vision_config": _QWEN_TOWER
            | {"out_hidden_size": 32, "intermediate_size": 24, "fullatt_block_indexes": [0]},
            "tie_word_embeddings": True,
        } | _IDS,
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": _TEXT
            | {"head_dim": 16, "rope_parameters": _AXES | {"mrope_section": [4, 2, 2]}},
            "vision_config": _QWEN_TOWER
            | {"out_hidden_size": 32, "intermediate_size": 24, "deepstack_visual_indexes": [0]}
            | {"num_position_embeddings": 16},
            "tie_word_embeddings": False,
        } | _IDS,
    ),
    "gemma3": (
        "Gemma3Seeing",
        {
            "text_config": _TEXT
            | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24},
            "vision_config": _TOWER,
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": _TEXT
            | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": _TOWER | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None}
            | {"tie_word_embeddings": True},
            "vision_config": _TOWER | {"model_type": "clip_vision_model"},
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        "Mistral3",
        {
            "text_config": _TEXT | {"model_type": "ministral3", "head_dim": 16},
            "vision_config": _TOWER | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
SETTINGS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 60}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name in MODELS to its checkpoint, as Transformers writes it."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            model = checkpoints.make_model(*MODELS[name])
            made[name] = checkpoints.save(model, tmp_path_factory.mktemp("seeing") / name)
        return made[name]

    return get


def renamed(source: Path, target: Path, rename: Callable[[str], str]) -> Path:
    """Copy a checkpoint with other names of tensors."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
            save_file(tensors, target / path.name, {"format": "pt"})
        else:
            (target / path.name).write_bytes(path.read_bytes())
    return target


def nested(name: str) -> str:
    """Return the name in the layout of LLaVA: language_model.model.layers."""
    text = text_name(name)
    return name if is_of_tower(name) else f"language_model.{text}"


def inner(name: str) -> str:
    """Return the name in Transformers' newer layout: model.language_model.layers."""
    text = text_name(name)
    if is_of_tower(name):
        return f"model.{name.removeprefix('model.')}"
    return re.sub(r"^model\.", "model.language_model.", text)


def answers(path: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(str(path), **SETTINGS, **settings)
    asked = prompts()
    found = llm.generate([{"prompt_token_ids": one} for one in asked], GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(11, 128, (n,), generator=generator).tolist() for n in (3, 21)]


@pytest.mark.parametrize("layout", ["as saved", "nested", "inner"])
@pytest.mark.parametrize("name", MODELS)
def test_text_is_that_of_transformers(
    folder: Callable[[str], Path], tmp_path: Path, name: str, layout: str
) -> None:
    path = folder(name)
    if layout != "as saved":
        path = renamed(path, tmp_path / "m", nested if layout == "nested" else inner)
    model = checkpoints.make_model(*MODELS[name])
    assert answers(path) == checkpoints.greedy_batch(model, prompts(), 12)


def test_published_qwen_configs_have_no_text_config(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = renamed(folder("qwen2.5-vl"), tmp_path / "m", text_name)
    raw = json.loads((path / "config.json").read_text())
    text = {k: v for k, v in raw.pop("text_config").items() if k not in ("model_type", "dtype")}
    axes = {"type": "mrope", "mrope_section": [1, 1, 2]}
    flat = text | raw | {"rope_scaling": axes, "rope_theta": 10000.0}
    del flat["rope_parameters"]
    (path / "config.json").write_text(json.dumps(flat))
    model = checkpoints.make_model(*MODELS["qwen2.5-vl"])
    assert answers(path) == checkpoints.greedy_batch(model, prompts(), 12)


def test_pickled_weights_have_the_same_names(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = renamed(folder("qwen3-vl"), tmp_path / "m", inner)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert answers(path) == answers(folder("qwen3-vl"))


def test_int8_leaves_the_tower_out(folder: Callable[[str], Path]) -> None:
    assert len(answers(folder("qwen3-vl"), quantization="int8")[0]) == 12
    described = read_folder(folder("qwen3-vl"), "m")
    assert described.problem is None
    assert not any(is_of_tower(one.name) for one in described.parameters)


def test_the_transformers_implementation_is_refused(folder: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="not through Transformers"):
        LLM(str(folder("gemma3")), model_impl="transformers", **SETTINGS)


def test_overrides_reach_the_decoder(folder: Callable[[str], Path]) -> None:
    raw = json.loads((folder("gemma3") / "config.json").read_text())
    config = parse_config(override(raw, {"sliding_window": 5, "tie_word_embeddings": False}))
    assert (config.sliding_window, config.tie_word_embeddings) == (5, False)
    assert load_config(folder("gemma3")).sliding_window == 8
    flat = {"model_type": "qwen2_vl", "text_config": {}, "hidden_size": 32}
    assert override(flat, {"rope_theta": 5.0}) == flat | {"rope_theta": 5.0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("model.vision_tower.vision_model.embeddings.x", "vision_tower.embeddings.x"),
        ("model.multi_modal_projector.linear_1.bias", "multi_modal_projector.linear_1.bias"),
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.vision_model.post_layernorm.bias", "vision_model.post_layernorm.bias"),
        (
            "model.connector.modality_projection.proj.weight",
            "connector.modality_projection.proj.weight",
        ),
        ("re:.*text_model.*q_proj$", "re:.*model.*q_proj$"),
        ("re:.*mlp.gate$", "re:.*mlp.gate$"),
        (r"re:model\.language_model\.layers\.0.*", r"re:model\.layers\.0.*"),
        ("re:.*language_model.*q_proj$", "re:.*model.*q_proj$"),
        ("re:model.language_model.*mlp.*", "re:model.*mlp.*"),
        (r"re:.*language_model\.lm_head", "re:.*lm_head"),
    ],
)
def test_names_of_the_decoder(name: str, text: str) -> None:
    assert text_pattern(name) == text


def test_unknown_decoders_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = renamed(folder("mistral3"), tmp_path / "m", str)
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["model_type"] = "mamba"
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="unsupported architecture 'Mistral3For"):
        load_config(path)


def adapter(path: Path, *modules: str) -> Path:
    """Write an adapter of rank 2 that changes these modules."""
    path.mkdir()
    generator = torch.Generator().manual_seed(3)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "qkv"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for module in modules:
        for part, shape in (("A", (2, 32)), ("B", (64, 2))):
            name = f"base_model.model.{module}.lora_{part}.weight"
            tensors[name] = torch.randn(shape, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_adapters_change_the_decoder(folder: Callable[[str], Path], tmp_path: Path) -> None:
    outputs = []
    for number, prefix in enumerate(
        ("model.layers", "model.language_model.layers", "language_model.model.layers")
    ):
        path = adapter(
            tmp_path / str(number), *(f"{prefix}.{index}.self_attn.q_proj" for index in range(2))
        )
        llm = LLM(str(folder("qwen3-vl")), lora_modules=(f"a={path}",), **SETTINGS)
        given = [{"prompt_token_ids": one} for one in prompts()]
        found = llm.generate(given, GREEDY, use_tqdm=False, lora_request=LoRARequest("a"))
        outputs.append([list(one.outputs[0].token_ids) for one in found])
    assert outputs[0] == outputs[1] == outputs[2] != answers(folder("qwen3-vl"))


def test_adapters_of_a_tower_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", "model.visual.blocks.0.attn.qkv")
    with pytest.raises(CheckpointError, match="the model's tower for pictures"):
        LLM(str(folder("qwen3-vl")), lora_modules=(f"a={path}",), **SETTINGS)


def test_tokens_that_end_an_answer_are_those_of_the_decoder(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = renamed(folder("gemma3"), tmp_path / "m", str)
    (path / "generation_config.json").unlink()
    raw = json.loads((path / "config.json").read_text())
    raw.pop("eos_token_id", None)
    raw["text_config"]["eos_token_id"] = 42
    (path / "config.json").write_text(json.dumps(raw))
    assert eos_token_ids(path, None) == [42]


@pytest.mark.parametrize(
    "name", ["autoround-gptq-mixed", "ct-fp8-block-ignore", "ct-w4a16-g32-asym-regex", "fp8-block"]
)
def test_quantized_decoders_next_to_a_tower(tmp_path: Path, name: str) -> None:
    """Modules are named in lists, as keys, and in expressions."""
    plain = Path(__file__).parents[1] / "weights" / "quantized" / name
    path = renamed(plain, tmp_path / "m", inner)
    raw = json.loads((path / "config.json").read_text())
    quantization = json.loads(re.sub(r"model\.layers", "model.language_model.layers",
                                     json.dumps(raw.pop("quantization_config"))))  # fmt: skip
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": raw | {"model_type": "mistral", "sliding_window": None},
        "vision_config": {},
        "quantization_config": quantization,
    }
    (path / "config.json").write_text(json.dumps(whole))
    assert answers(path, dtype="float32") == answers(plain, dtype="float32")
