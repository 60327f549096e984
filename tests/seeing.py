"""A tiny model of Qwen2.5-VL with random weights, as a folder to serve."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from toolkit.weights.names import is_of_tower

CONTEXT = 600  # tokens
START, END, VISION_START, IMAGE, VISION_END = range(257, 262)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SETTINGS = {
    "text_config": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
        },
    },
    "vision_config": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "out_hidden_size": 32, "intermediate_size": 24,
        "fullatt_block_indexes": [0],
    },
    "tie_word_embeddings": True, "image_token_id": IMAGE, "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 2560,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reads parts as Qwen2.5-VL's."""
TEXT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reads text alone."""


def save(folder: Path) -> Path:
    """Write the model. Its tower's weights are large: pictures change all answers."""
    checkpoints.save(checkpoints.make_model("Qwen2_5_VL", SETTINGS), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if is_of_tower(name):
            tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    [first, *_] = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [first] + [
        first | {"id": START + index, "content": text} for index, text in enumerate(SPECIAL)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    checkpoints.edit_json(folder / "tokenizer_config.json", extra_special_tokens=list(SPECIAL))
    return folder
