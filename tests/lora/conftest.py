"""Adapters that PEFT makes and runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from toolkit import LLM, LoRARequest, SamplingParams

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
    "ends": ("llama3-gqa", {"r": 4, "target_modules": ["embed_tokens", "lm_head", "up_proj"]}),
    "tied": ("gpt2", {"r": 4, "target_modules": ["wte", "lm_head"]}),
    "shared expert": (
        "qwen2-moe",
        {"r": 4, "target_modules": r".*\.(q_proj|o_proj|shared_expert\.(gate|up|down)_proj)"},
    ),
    "delta nets": (
        "qwen3-next",
        {"r": 4, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]},
    ),
    "split delta nets": (
        "qwen3.5",
        {"r": 4, "target_modules": r".*\.(in_proj_(qkv|z|b|a)|out_proj|o_proj|up_proj)"},
    ),
    "convolutions": ("lfm2", {"r": 4, "target_modules": ["in_proj", "out_proj", "w2"]}),
    "inputs of layers": ("gemma4", {"r": 4, "target_modules": "all-linear"}),
    "keys as values": ("gemma4-dense", {"r": 4, "target_modules": ["k_proj", "o_proj"]}),
    "interleaved": ("gpt-neox", {"r": 4, "target_modules": ["query_key_value"]}),
}
"""Base model and PEFT's options by a name. `all` and `attention` share a base."""
STRENGTH = 0.2  # of adapters: the answers differ from the base's
PROMPT = [7, 3, 9, 12, 5, 40, 41, 2, 17, 90, 23]
COUNT = 12
CPU = {"device": "cpu", "dtype": "float32", "max_model_len": 128}


class Adapter:
    """An adapter on disk, and its model in Transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        import peft  # GPU machines may lack it

        self.base, options = OPTIONS[name]
        self.folder = folder / name
        model = checkpoints.make_reference(self.base).module
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


def engine(folder: Path, adapters: dict[str, Path], **settings: object) -> LLM:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    return LLM(str(folder), lora_modules=modules, **CPU | settings)


def generate(llm: LLM, prompts: list[list[int]], names: list[str], **params: object) -> list:
    settings = SamplingParams(
        **{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | params
    )
    requests = [LoRARequest(name) if name else None for name in names]
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        settings,
        use_tqdm=False,
        lora_request=requests,
    )


def tokens(results: list) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in results]
