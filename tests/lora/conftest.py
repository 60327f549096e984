"""Adapters that PEFT makes and runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch

from tests import checkpoints

OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "attention": ("llama3-gqa", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
    "all": ("llama3-gqa", {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}),
    "rslora": ("llama3-gqa", {"r": 9, "use_rslora": True, "target_modules": ["down_proj"]}),
    "patterns": (
        "llama3-gqa",
        {
            "r": 4,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
            "alpha_pattern": {"o_proj": 32},
            "target_modules": r".*\.(q_proj|o_proj|up_proj)",
        },
    ),
    "gpt2": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "fused": ("phi3", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "interleaved": ("gpt-neox", {"r": 4, "target_modules": ["query_key_value"]}),
}
"""Base model and PEFT's options by a name. `all` and `attention` share a base."""
STRENGTH = 0.2  # of adapters: the answers differ from the base's


class Adapter:
    """An adapter on disk, and its model in Transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.base, options = OPTIONS[name]
        self.folder = folder / name
        model = checkpoints.make_reference(self.base)
        torch.manual_seed(sum(map(ord, name)))
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        self.model = peft.get_peft_model(model, config).eval()
        for parameter_name, parameter in self.model.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.normal_(0.0, STRENGTH)
        self.model.save_pretrained(self.folder)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return Transformers' answer with the adapter."""
        return checkpoints.greedy(self.model, prompt, count)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapter]:
    """Return a function from names in OPTIONS to adapters."""
    folder, made = tmp_path_factory.mktemp("adapters"), {}

    def get(name: str) -> Adapter:
        if name not in made:
            made[name] = Adapter(name, folder)
        return made[name]

    return get
