"""Tiny models that see, prompts with pictures, and Transformers' answers to them."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from tests import checkpoints
from tests.references import FOLDER, NEAR, Reference, _digest
from toolkit.pictures.pool import Pixels
from toolkit.pictures.processor import PictureProcessor
from toolkit.pictures.settings import PictureLimits, ProcessorSettings
from toolkit.pictures.sources import Encoded
from toolkit.weights.names import is_of_tower

PICTURE, START, END = 7, 9, 10  # tokens
_IDS = {
    "image_token_id": PICTURE, "video_token_id": 8, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
_TEXT = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_QWEN = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 10000.0}
_PIXELS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
_PROCESSOR = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64,
    "max_pixels": 64 * 40,
} | _PIXELS  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 20,
    "num_attention_heads": 2, "image_size": 21, "patch_size": 4, "layer_norm_eps": 1e-3,
}  # fmt: skip
_SQUARE = {"size": {"shortest_edge": 24}, "crop_size": {"height": 21, "width": 21}} | _PIXELS
BREAK, LAST = 257, 259  # tokens after a row and after a picture, of Mistral
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        "Qwen2VL",
        {
            "text_config": _TEXT | {"rope_parameters": _AXES | {"mrope_section": [1, 1, 2]}},
            "vision_config": _QWEN | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            "tie_word_embeddings": False,
        } | _IDS,
        {"image_processor_type": "Qwen2VLImageProcessor"} | _PROCESSOR,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": _TEXT | {"rope_parameters": _AXES | {"mrope_section": [2, 1, 1]}},
            "vision_config": _QWEN
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 20}
            | {"window_size": 32, "fullatt_block_indexes": [1]},
            "tie_word_embeddings": True,
        } | _IDS,
        {"image_processor_type": "Qwen2VLImageProcessorFast"} | _PROCESSOR,
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": _TEXT
            | {"head_dim": 16, "rope_parameters": _AXES | {"mrope_section": [4, 2, 2]}},
            "vision_config": _QWEN
            | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 20}
            | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            "tie_word_embeddings": False,
        } | _IDS,
        {"image_processor_type": "Qwen2VLImageProcessorFast"} | _PROCESSOR,
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": _TEXT
            | {"model_type": "mistral", "head_dim": 8, "sliding_window": None}
            | {"rms_norm_eps": 1e-3},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 20,
                "num_attention_heads": 3, "num_hidden_layers": 3, "patch_size": 4,
                "hidden_act": "silu",
                "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
            },
            "vision_feature_layer": -2, "multimodal_projector_bias": True,
            "projector_hidden_act": "gelu_pytorch_tanh", "image_token_index": PICTURE,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 4}
        | {"size": {"longest_edge": 46}} | _PIXELS,
    ),
    "llava": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _CLIP | {"num_hidden_layers": 3},
            "image_token_index": PICTURE,
        },
        {"image_processor_type": "CLIPImageProcessor"} | _SQUARE,
    ),
    "llava-full": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
            "vision_config": _CLIP | {"num_hidden_layers": 4, "hidden_act": "gelu"},
            "vision_feature_layer": [3, 0, -3], "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False, "projector_hidden_act": "silu",
            "image_token_index": PICTURE,
        },
        {"image_processor_type": "CLIPImageProcessor"} | _SQUARE,
    ),
}  # fmt: skip
_DENSE = MODELS["qwen3-vl"][1]
MODELS["qwen3-vl-moe"] = (
    "Qwen3VLMoe",
    _DENSE
    | {
        "text_config": _DENSE["text_config"]
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"mlp_only_layers": [1], "decoder_sparse_step": 1}
    },
    {"image_processor_type": "Qwen2VLImageProcessorFast"} | _PROCESSOR,
)
_HYBRID = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": _AXES | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 3, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_SHALLOW = {
    name: value
    for name, value in _DENSE["vision_config"].items()
    if name != "deepstack_visual_indexes"
}
MODELS["qwen3.5"] = (
    "Qwen3_5Seeing",
    _DENSE | {"text_config": _TEXT | _HYBRID, "vision_config": _SHALLOW},
    {"image_processor_type": "Qwen2VLImageProcessorFast"} | _PROCESSOR,
)
MODELS["qwen3.5-moe"] = (
    "Qwen3_5MoeSeeing",
    MODELS["qwen3.5"][1]
    | {
        "text_config": _TEXT
        | _HYBRID
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 16}
    },
    {"image_processor_type": "Qwen2VLImageProcessorFast"} | _PROCESSOR,
)
MODELS["gemma3"] = (
    "Gemma3Seeing",
    {
        "text_config": _TEXT
        | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 20,
            "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 36, "patch_size": 4,
            "layer_norm_eps": 1e-3,
        },
        "mm_tokens_per_image": 9, "image_token_index": PICTURE, "boi_token_index": START,
        "eoi_token_index": END, "tie_word_embeddings": False,
    },
    {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 36, "width": 36}}
    | _PIXELS,
)  # fmt: skip
"""A picture has 9 tokens, more than a sliding window."""
_TILED = {"vocab_size": 274}  # with the tokens of `tiled_tokenizer`
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
MODELS["idefics3"] = (
    "Idefics3",
    {
        "text_config": _TEXT | _TILED | {"model_type": "llama"},
        "vision_config": _SIGLIP
        | {"image_size": 19, "patch_size": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
        "scale_factor": 3, "image_token_id": PICTURE, "tie_word_embeddings": False,
    },
    {"image_processor_type": "Idefics3ImageProcessor", "resample": 2}
    | {"size": {"longest_edge": 34}, "max_image_size": {"longest_edge": 19}} | _PIXELS,
)  # fmt: skip
MODELS["idefics3-whole"] = (
    *MODELS["idefics3"][:2],
    MODELS["idefics3"][2] | {"do_image_splitting": False},
)
MODELS["smolvlm"] = (
    "SmolVLM",
    {
        "text_config": _TEXT | _TILED | {"model_type": "llama", "head_dim": 12},
        "vision_config": _SIGLIP | {"image_size": 16, "patch_size": 4, "num_hidden_layers": 3},
        "scale_factor": 2, "image_token_id": PICTURE, "tie_word_embeddings": True,
    },
    {"image_processor_type": "SmolVLMImageProcessor"}
    | {"size": {"longest_edge": 30}, "max_image_size": {"longest_edge": 16}} | _PIXELS,
)  # fmt: skip
_INTERN = _SIGLIP | {"image_size": 16, "patch_size": 4, "num_hidden_layers": 3}
_GOT = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 16, "width": 16},
    "crop_to_patches": False, "max_patches": 4,
} | _PIXELS  # fmt: skip
MODELS["internvl"] = (
    "InternVL",
    {
        "text_config": _TEXT | _TILED | {"model_type": "qwen2"},
        "vision_config": _INTERN | {"attention_bias": True, "layer_norm_eps": 1e-3},
        "image_token_id": PICTURE, "tie_word_embeddings": False,
    },
    _GOT,
)  # fmt: skip
MODELS["internvl-rms"] = (
    "InternVL",
    {
        "text_config": _TEXT | _TILED | {"model_type": "qwen3", "head_dim": 12},
        "vision_config": _INTERN
        | {"use_qk_norm": True, "norm_type": "rms_norm", "use_mask_token": True}
        | {"image_size": [24, 24], "patch_size": [3, 3], "hidden_act": "silu"},
        "downsample_ratio": 0.25, "projector_hidden_act": "gelu_pytorch_tanh",
        "vision_feature_layer": -2, "image_token_id": PICTURE, "tie_word_embeddings": True,
    },
    _GOT | {"size": {"height": 24, "width": 24}, "min_patches": 2, "max_patches": 5},
)  # fmt: skip
MODELS["internvl-llama"] = (
    "InternVL",
    {
        "text_config": _TEXT | _TILED | {"model_type": "llama"},
        "vision_config": _INTERN | {"hidden_act": "gelu_pytorch_tanh"},
        "vision_feature_layer": 1, "downsample_ratio": 1.0,
        "image_token_id": PICTURE, "tie_word_embeddings": False,
    },
    _GOT | {"max_patches": 1},
)  # fmt: skip
COUNT = 8  # tokens of an answer


class Asked(NamedTuple):
    """A prompt with a placeholder for each picture, and the pictures."""

    token_ids: list[int]
    pictures: tuple[int, ...] = ()

    @property
    def prompt(self) -> dict[str, Any]:
        given: dict[str, Any] = {"prompt_token_ids": self.token_ids}
        if self.pictures:
            given["multi_modal_data"] = {"image": [image(one) for one in self.pictures]}
        return given


SEEN = [START, PICTURE, END]
ASKED = (
    Asked([11, 12, *SEEN, 13, 14], (0,)),
    Asked([20, 21, 22, 23, 24]),
    Asked([*SEEN, 31, 32, *SEEN, 33], (1, 2)),
    Asked([11, 12, *SEEN, 13, 14], (1,)),  # another picture after the same text
    Asked([11, 12, *SEEN, 40, 41], (0,)),  # the same picture, and other text
)
_SIZES = ((50, 33), (20, 64), (9, 9))  # width and height


@functools.cache
def image(index: int) -> Image.Image:
    """Return a random picture."""
    width, height = _SIZES[index]
    values = np.random.RandomState(index).randint(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def reference(name: str) -> Reference:
    family, settings, _ = MODELS[name]
    return checkpoints.make_model(family, settings).changed(louder)


def louder(model: torch.nn.Module) -> None:
    """Make the tower's parameters large, so that pictures change answers."""
    for name, parameter in model.named_parameters():
        if _is_loud(name, parameter):
            parameter.data *= 8


def _is_loud(name: str, parameter: torch.Tensor) -> bool:
    """Return True but for Gemma 3's projection: its rows would hardly change in the decoder."""
    return is_of_tower(name) and parameter.dim() > 1 and "input_projection" not in name


def save(name: str, folder: Path, *, is_published: bool = True, is_loud: bool = True) -> Path:
    """Write a checkpoint with its image processor.

    is_published: experts are [in, out], as in published files, and not as Transformers has them.
    is_loud: as `louder` makes it."""
    from safetensors.torch import load_file, save_file

    family, settings, processor = MODELS[name]
    checkpoints.save(checkpoints.make_model(family, settings), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if is_loud and _is_loud(key, tensor):
            tensor *= 8
        if is_published and key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if family == "Mistral3":
        names = {"image_break_token": "<|user|>", "image_end_token": "<|end|>"}
        (folder / "processor_config.json").write_text(json.dumps(names))
    if family in ("Idefics3", "SmolVLM", "InternVL"):
        tiled_tokenizer(family).save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def tiled_tokenizer(family: str) -> Tokenizer:
    """Return the tokenizer of a family whose pictures are tiles: bytes, and tokens around these."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json"))
    cells = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    more = ["<global-img>"] if family == "Idefics3" else []  # else it is text
    if family == "InternVL":
        more, cells = ["<img>", "</img>"], []
    tokenizer.add_special_tokens(["<fake_token_around_image>", "<image>", *more, *cells])
    return tokenizer


def answer(name: str, asked: Asked, *, is_adapted: bool = False) -> list[int]:
    """Return Transformers' greedy tokens after a prompt."""
    query = f"pictures {_digest([asked.token_ids, asked.pictures, _settings(name)])}"
    model = reference(name)
    if is_adapted:
        family, settings, _ = MODELS[name]
        model = checkpoints.make_model(family, settings).changed(adapted)
    return model.tokens(query, lambda model: _generate(model, name, asked), COUNT)


def logprobs(name: str, asked: Asked, tokens: Sequence[int]) -> list[float]:
    """Return Transformers' log-probabilities of tokens after a prompt."""
    query = f"logprobs {_digest([asked.token_ids, asked.pictures, list(tokens), _settings(name)])}"

    def compute(model: Any) -> torch.Tensor:
        inputs, token_ids = inputs_of(name, asked)
        ids = torch.tensor([[*token_ids, *tokens]])
        kinds = {"mm_token_type_ids": (ids == PICTURE).int()} if "Qwen" in MODELS[name][0] else {}
        with torch.no_grad():
            logits = model(ids, attention_mask=torch.ones_like(ids), **inputs, **kinds).logits[0]
        chosen = logits[len(token_ids) - 1 : -1].float().log_softmax(-1)
        return chosen.gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]

    return reference(name).tensor(query, compute).tolist()


def adapted(model: torch.nn.Module) -> None:
    """Change the model as `louder`, and as the adapter of `save_adapter`."""
    louder(model)
    for name, parameter in model.named_parameters():
        if name.endswith("language_model.layers.1.self_attn.q_proj.weight"):
            a, b = _factors(*parameter.shape)
            parameter.data += 2.0 * (b @ a)


def save_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of rank 2 that changes one layer's queries."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["layers.1.self_attn.q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.language_model.layers.1.self_attn.q_proj"
    a, b = _factors(32, 32)
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def _factors(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.RandomState(5)
    a, b = random.standard_normal((2, columns)), random.standard_normal((rows, 2))
    return torch.from_numpy(a).float(), torch.from_numpy(b).float()


def causal_answer(name: str, asked: Asked) -> list[int]:
    """Return what Transformers would answer if pictures' tokens did not see each other."""
    query = f"causal {_digest([asked.token_ids, asked.pictures, _settings(name)])}"

    def compute(model: Any) -> list[int]:
        return _generate(model, name, asked, both_ways=False)

    return reference(name).tokens(query, compute, COUNT)


def rows(name: str, pictures: Sequence[int]) -> torch.Tensor:
    """Return Transformers' rows [num_rows, hidden] for pictures that are encoded together.

    Those of the checkpoint that `save` writes quietly."""
    family, settings, _ = MODELS[name]

    def compute(model: Any) -> torch.Tensor:
        asked = Asked([PICTURE] * len(pictures), tuple(pictures))
        inputs, _ = _INPUTS[family](asked, name)
        with torch.no_grad():
            found = model.model.get_image_features(**inputs).pooler_output
        return torch.cat(list(found))

    query = f"rows {_digest([list(pictures), _settings(name)])}"
    return checkpoints.make_model(family, settings).tensor(query, compute)


def _settings(name: str) -> dict[str, Any]:
    """Return the image processor's settings."""
    return {key: value for key, value in MODELS[name][2].items() if not key.endswith("_type")}


def _generate(model: Any, name: str, asked: Asked, *, both_ways: bool = True) -> list[int]:
    inputs, token_ids = {}, asked.token_ids
    if asked.pictures:
        inputs, token_ids = inputs_of(name, asked)
    ids = torch.tensor([token_ids])
    given = {"attention_mask": torch.ones_like(ids), **inputs}
    with torch.no_grad():
        if asked.pictures and "Qwen" in MODELS[name][0]:
            given["mm_token_type_ids"] = (ids == PICTURE).int()
        if asked.pictures and both_ways and "Gemma" in MODELS[name][0]:
            given["token_type_ids"] = (ids == PICTURE).int()
        out = model.generate(
            ids,
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=checkpoints.VOCAB + 1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **given,
        )
    best = torch.cat(out.logits).topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    assert gap > NEAR, f"a near-tie ({gap}) after {asked}: choose another prompt"
    return out.sequences[0, len(token_ids) :].tolist()


Inputs = tuple[dict[str, Any], list[int]]


def _processed(module: str, class_name: str, asked: Asked, **settings: Any) -> Any:
    """Return the outputs of an image processor."""
    name = f"transformers.models.{module}.image_processing_pil_{module}"
    made = getattr(importlib.import_module(name), f"{class_name}Pil")(**settings)
    return made(images=[image(one) for one in asked.pictures], return_tensors="pt")


def _expanded(asked: Asked, pictures: Sequence[list[int]]) -> list[int]:
    """Return a prompt with the tokens of pictures."""
    left, token_ids = iter(pictures), []
    for token in asked.token_ids:
        token_ids += next(left) if token == PICTURE else [token]
    return token_ids


def _qwen_inputs(asked: Asked, name: str) -> Inputs:
    found = _processed("qwen2_vl", "Qwen2VLImageProcessor", asked, **_settings(name))
    counts = (found["image_grid_thw"].prod(-1) // 4).tolist()
    names = "pixel_values", "image_grid_thw"
    inputs = {key: found[key] for key in names}
    return inputs, _expanded(asked, [[PICTURE] * count for count in counts])


def _mistral_inputs(asked: Asked, name: str) -> Inputs:
    """Return inputs as Transformers' PixtralProcessor makes them."""
    settings = _settings(name) | {"patch_size": 8}
    found = _processed("pixtral", "PixtralImageProcessor", asked, **settings)
    pictures = []
    for height, width in found["image_sizes"].tolist():
        ids = ([PICTURE] * (width // 8) + [BREAK]) * (height // 8)
        pictures.append([*ids[:-1], LAST])
    inputs = {key: found[key] for key in ("pixel_values", "image_sizes")}
    return inputs, _expanded(asked, pictures)


def _llava_inputs(asked: Asked, name: str) -> Inputs:
    found = _processed("clip", "CLIPImageProcessor", asked, **_settings(name))
    ids = [PICTURE] * (26 if name == "llava-full" else 25)
    inputs = {"pixel_values": found["pixel_values"]}
    return inputs, _expanded(asked, [ids] * len(asked.pictures))


def _gemma_inputs(asked: Asked, name: str) -> Inputs:
    found = _processed("gemma3", "Gemma3ImageProcessor", asked, **_settings(name))
    inputs = {"pixel_values": found["pixel_values"]}
    return inputs, _expanded(asked, [[PICTURE] * 9] * len(asked.pictures))


def _idefics_inputs(asked: Asked, name: str) -> Inputs:
    """Return inputs as Transformers' Idefics3Processor makes them."""
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    family, settings, _ = MODELS[name]
    given = _settings(name) | {"return_row_col_info": True}
    found = _processed(family.lower(), f"{family}ImageProcessor", asked, **given)
    vision = settings["vision_config"]
    side = vision["image_size"] // vision["patch_size"] // settings["scale_factor"]
    texts = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=side**2,
    )
    tokenizer = tiled_tokenizer(family)
    token_id = tokenizer.token_to_id("<image>")
    pictures = []
    for index in range(len(asked.pictures)):
        ids = tokenizer.encode(Idefics3Processor.replace_image_token(texts, found, index)).ids
        pictures.append([PICTURE if one == token_id else one for one in ids])
    inputs = {key: found[key] for key in ("pixel_values", "pixel_attention_mask")}
    return inputs, _expanded(asked, pictures)


def _internvl_inputs(asked: Asked, name: str) -> Inputs:
    """Return inputs as Transformers' InternVLProcessor makes them."""
    family, *_ = MODELS[name]
    given = _settings(name) | {"crop_to_patches": True}
    found = _processed("got_ocr2", "GotOcr2ImageProcessor", asked, **given)
    count = {"internvl": 4, "internvl-rms": 4, "internvl-llama": 16}[name]
    begin, end = (tiled_tokenizer(family).token_to_id(one) for one in ("<img>", "</img>"))
    pictures = [[begin, *[PICTURE] * (count * tiles), end] for tiles in found["num_patches"]]
    return {"pixel_values": found["pixel_values"]}, _expanded(asked, pictures)


_INPUTS: dict[str, Callable[[Asked, str], Inputs]] = {
    "Qwen2VL": _qwen_inputs, "Qwen2_5_VL": _qwen_inputs, "Qwen3VL": _qwen_inputs,
    "Qwen3VLMoe": _qwen_inputs, "Qwen3_5Seeing": _qwen_inputs, "Qwen3_5MoeSeeing": _qwen_inputs,
    "Mistral3": _mistral_inputs, "Llava": _llava_inputs, "Gemma3Seeing": _gemma_inputs,
    "Idefics3": _idefics_inputs, "SmolVLM": _idefics_inputs,
    "InternVL": _internvl_inputs,
}  # fmt: skip
"""Functions that return Transformers' inputs for pictures, and the prompt with all of their
tokens; by class."""


def inputs_of(name: str, asked: Asked) -> Inputs:
    """Return Transformers' inputs for a prompt's pictures, and the prompt with all their tokens."""
    return _INPUTS[MODELS[name][0]](asked, name)


class InlinePool:
    """Stands for `PicturePool`: prepares pictures in this process, when they are asked for."""

    def __init__(self, settings: ProcessorSettings, limits: PictureLimits, keeper: str) -> None:
        self._processor = PictureProcessor(settings)
        self.num_processed = 0

    def start(self) -> None: ...

    def close(self) -> None: ...

    def process(self, encoded: Encoded, param: str) -> Future[Pixels]:
        assert encoded.raw_size is not None, "only images of Pillow"
        assert isinstance(encoded.data, bytes)
        self.num_processed += 1
        picture = Image.frombytes("RGB", encoded.raw_size, encoded.data)
        grid, array = self._processor.process(picture)
        pixels = Pixels(*picture.size, grid, array.shape, str(array.dtype), array.tobytes())
        done: Future[Pixels] = Future()
        done.set_result(pixels)
        return done


def prompts(asked: Sequence[Asked] = ASKED) -> list[dict[str, Any]]:
    return [one.prompt for one in asked]
