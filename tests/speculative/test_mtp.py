"""Layers of a model's own checkpoint that draft: drafts are those of Transformers' layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests import engines
from tests.checkpoints import make_model, save
from tests.models.architectures import ARCHITECTURES
from tests.speculative.drafting import (
    SETTINGS,
    answers,
    drafting_engine,
    few_measured_steps,
    logged_steps,
    random_prompts,
)
from tests.speculative.plain import Target, shrunk
from tests.speculative.test_eagle import (
    LIKELY,
    MOST,
    PARAMS,
    Reference,
    require_reference_drafts,
)
from toolkit.config import EngineConfig
from toolkit.errors import ConfigError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.drafters import drafter_of
from toolkit.inventory.estimate import estimate
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "frequency_penalty": 0.3}
SAMPLED = {"temperature": 0.7, "seed": 5, "max_tokens": 40, "logprobs": 2}
MTP = {"method": "mtp", "num_speculative_tokens": MOST}


class DraftModule(nn.Module):
    """The module of DeepSeek-V3's figure 3, with GLM-4.5's layer and names."""

    def __init__(self, config: object, index: int) -> None:
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

        super().__init__()
        hidden = config.hidden_size
        self.enorm, self.hnorm = (nn.RMSNorm(hidden, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = Glm4MoeDecoderLayer(config, index)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {}
        for key, tensor in self.state_dict().items():
            own = key.removeprefix("layer.")
            own = f"shared_head.{own}" if key == "norm.weight" else own
            found[f"{name}.{own}"] = tensor.contiguous()
        return found


class TransformersTarget(Target):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def compute(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        found = self.model(tokens[None], output_hidden_states=True).hidden_states
        return [one[0] for one in found]

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(x)


@dataclass
class ModuleReference(Reference):
    module: DraftModule | None = None

    def run(
        self, features: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module, model = self.module, self.target.model.base_model
        embeddings = model.embed_tokens(tokens)
        x = module.eh_proj(torch.cat((module.enorm(embeddings), module.hnorm(features)), 1))[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
        rotation = model.rotary_emb(x, positions)
        y = module.layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotation
        )
        last = (y if isinstance(y, torch.Tensor) else y[0])[0, -1]
        return self.target.head(module.norm(last)), last


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A checkpoint in which all experts are per layer, as published, and the reference."""
    family, settings = ARCHITECTURES["glm4-moe"]
    target = make_model(family, settings | {"tie_word_embeddings": False}, seed=3)
    target.lm_head.weight.data = shrunk(target.lm_head.weight.data, LIKELY)
    folder = save(target, tmp_path_factory.mktemp("target"))
    index = target.config.num_hidden_layers
    torch.manual_seed(5)
    module = DraftModule(target.config, index)
    for name, one in [*module.named_parameters(), *module.named_buffers()]:
        nn.init.normal_(one, 1.0 if re.search(r"norm\d?\.weight", name) else 0.0, 0.3)
    module.requires_grad_(False).eval()
    name = f"model.layers.{index}"
    tensors = module.tensors(name)
    for part, stacks in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        stack = tensors.pop(f"{name}.mlp.experts.{part}")
        for expert, both in enumerate(stack):
            for own, rows in zip(stacks, both.chunk(len(stacks)), strict=True):
                tensors[f"{name}.mlp.experts.{expert}.{own}.weight"] = rows.contiguous()
    copies = {
        f"{name}.embed_tokens.weight": target.base_model.embed_tokens.weight.clone(),
        f"{name}.shared_head.head.weight": target.lm_head.weight.clone(),
    }
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors | copies, file, metadata={"format": "pt"})
    return folder, ModuleReference(TransformersTarget(target), {}, [], module=module)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 16, "block_size": 8, "swap_space": 0.001},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 2},
    ],
    ids=["chunks", "swap", "ranks"],
)
def test_drafts_are_those_of_transformers_layer(engine, made, settings: dict):
    folder, reference = made
    given = {"max_model_len": 120} | settings
    plain = engine(folder, **SETTINGS | {"max_model_len": 120})
    prompts = random_prompts(3, 40)
    params = PARAMS | {"max_tokens": 16}
    llm = drafting_engine(folder, None, **given, speculative_config=MTP)
    with logged_steps(llm) as log:
        found = answers(llm, prompts, **params)
    llm.shutdown()
    assert found == answers(plain, prompts, **params)
    assert require_reference_drafts(log, reference) > 20
    assert 0 < log.num_accepted < 0.9 * log.num_drafts
    assert any(step.swap_in for step, _ in log.steps) == ("swap_space" in settings)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_drafts_on_a_gpu(made, enforce_eager: bool):
    """Prompts in chunks. In fp32, sums differ too little to change a token."""
    folder, reference = made
    settings = {
        "device": "cuda",
        "kv_cache_memory": None,
        "num_threads": None,
        "num_gpu_blocks_override": 128,
        "max_model_len": 120,
        "max_num_batched_tokens": 64,
    }
    prompts = random_prompts(8, 40)
    plain = drafting_engine(folder, None, **settings)
    expected = [answers(plain, prompts, **one) for one in (GREEDY, SAMPLED)]
    plain.shutdown()
    given = settings | {"enforce_eager": enforce_eager}
    llm = drafting_engine(folder, None, **given, speculative_config=MTP)
    with logged_steps(llm) as log:
        found = [answers(llm, prompts, **GREEDY)]
    found.append(answers(llm, prompts, **SAMPLED))
    assert bool(engines.graphs(llm)) == (not enforce_eager)
    llm.shutdown()
    assert found == expected
    assert require_reference_drafts(log, reference) > 50
    assert log.num_drafts > 100


def test_dry_run_counts_the_layer(made):
    folder, _ = made
    config = EngineConfig.from_settings(
        {"device": "cpu", "dtype": "float32", "kv_cache_memory": 0.01, "speculative_config": MTP}
    )
    checkpoint = read_folder(folder, "target")
    result = estimate(checkpoint, config, find_device("cpu"), drafter_of(checkpoint, config))
    with few_measured_steps():
        info = Worker(config, folder).start(lambda phase, seconds: None)
    assert (result.num_blocks, result.cache) == (info.num_blocks, info.cache_bytes)
    assert 0.95 * result.weights <= info.weight_bytes < 1.25 * result.weights
    assert result.drafter > 0


def test_models_without_such_a_layer_are_refused(made, tmp_path: Path):
    folder, _ = made
    family, settings = ARCHITECTURES["glm4-moe"]
    save(make_model(family, settings), tmp_path)
    with pytest.raises(ConfigError, match="no tensors of the layer that drafts"):
        drafting_engine(tmp_path, None, speculative_config=MTP)
    save(make_model("Llama", ARCHITECTURES["llama3-gqa"][1]), tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layer that drafts"):
        drafting_engine(tmp_path, None, speculative_config=MTP)
    with pytest.raises(ConfigError, match="the method mtp has no model"):
        drafting_engine(folder, None, speculative_config=MTP | {"model": str(folder)})
