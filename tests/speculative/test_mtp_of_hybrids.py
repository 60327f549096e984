"""Layers that draft in checkpoints of Qwen3-Next and Qwen3.5: drafts are those of plain PyTorch.

The reference follows `qwen3_next_mtp.py` and `qwen3_5_mtp.py` of vLLM: fc reads the norm of a
token's embedding, then the norm of the model's last hidden state (after its final norm) at the
position before; a layer of gated attention and a norm follow, and the output of that norm is what
the next draft reads as hidden state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests import engines, pictured
from tests.checkpoints import VOCAB, edit_json, make_model, save
from tests.models.architectures import ARCHITECTURES
from tests.pictured import ASKED, Asked, InlinePool
from tests.speculative import plain
from tests.speculative.drafting import (
    SETTINGS,
    Answer,
    answers,
    drafting_engine,
    few_measured_steps,
    logged_steps,
    random_prompts,
)
from tests.speculative.plain import Tensors, shrunk
from tests.speculative.test_eagle import LIKELY, MOST, require_reference_drafts
from tests.speculative.test_mtp import MTP, TransformersTarget
from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.engine.front import pictures
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.drafters import drafter_of
from toolkit.inventory.estimate import estimate
from toolkit.kernels.switch import only_pytorch
from toolkit.kernels.table import TritonKernels
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LAYER = "mtp.layers.0"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3.5", {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}),
    "qwen3.5-moe": ("qwen3.5-moe", {"mtp_num_hidden_layers": 2}),
    "qwen3-next": ("qwen3-next", {"mtp_use_dedicated_embeddings": True}),
}
"""Row of ARCHITECTURES, and fields of config.json. Qwen3-Next's need not name the layer."""


def random_layer(config: Any, *, has_table: bool) -> Tensors:
    """Return the tensors of a layer that drafts. All show in its output."""
    hidden, size, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    kv = config.num_key_value_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding": (hidden,),
        "mtp.pre_fc_norm_hidden": (hidden,),
        "mtp.norm": (hidden,),
        f"{LAYER}.input_layernorm": (hidden,),
        f"{LAYER}.post_attention_layernorm": (hidden,),
        f"{LAYER}.self_attn.q_proj": (2 * heads * size, hidden),
        f"{LAYER}.self_attn.k_proj": (kv, hidden),
        f"{LAYER}.self_attn.v_proj": (kv, hidden),
        f"{LAYER}.self_attn.o_proj": (hidden, heads * size),
        f"{LAYER}.self_attn.q_norm": (size,),
        f"{LAYER}.self_attn.k_norm": (size,),
    }
    if has_table:
        shapes["mtp.embed_tokens"] = (VOCAB, hidden)
    mlps = {f"{LAYER}.mlp": getattr(config, "intermediate_size", 0)}
    if count := getattr(config, "num_experts", 0):
        mlps = {f"{LAYER}.mlp.experts.{i}": config.moe_intermediate_size for i in range(count)}
        mlps[f"{LAYER}.mlp.shared_expert"] = config.shared_expert_intermediate_size
        shapes[f"{LAYER}.mlp.gate"] = (count, hidden)
        shapes[f"{LAYER}.mlp.shared_expert_gate"] = (1, hidden)
    for name, inner in mlps.items():
        shapes |= {f"{name}.gate_proj": (inner, hidden), f"{name}.up_proj": (inner, hidden)}
        shapes[f"{name}.down_proj"] = (hidden, inner)
    torch.manual_seed(5)
    return {
        f"{name}.weight": torch.randn(shape) * (0.3 if len(shape) == 1 else 2 * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def stacked(tensors: Tensors) -> Tensors:
    """Return tensors in which all experts of the layer are one, as in published checkpoints."""
    name = f"{LAYER}.mlp.experts"
    found = {key: one for key, one in tensors.items() if not key.startswith(name)}
    count = sum(key.startswith(name) for key in tensors) // 3
    gate, up, down = (
        torch.stack([tensors[f"{name}.{i}.{part}_proj.weight"] for i in range(count)])
        for part in ("gate", "up", "down")
    )
    found[f"{name}.gate_up_proj"] = torch.cat((gate, up), 1)
    return found | {f"{name}.down_proj": down}


@dataclass
class LayerReference:
    """Computes drafts with the layer, over complete sequences and without a cache."""

    target: TransformersTarget
    config: Any
    tensors: Tensors

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return plain.norm(x, 1 + self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first entries of heads [n, heads, size]; positions: [n, pairs]."""
        rope = self.config.rope_parameters
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        angles = positions * rope["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        name, size, count = f"{LAYER}.self_attn", self.config.head_dim, len(x)
        q, k, v = (F.linear(x, self.tensors[f"{name}.{part}_proj.weight"]) for part in "qkv")
        q, gate = q.view(count, -1, 2 * size).split(size, -1)
        k, v = (one.view(count, -1, size) for one in (k, v))
        q = self.rotated(self.norm(q, f"{name}.q_norm"), positions)
        k = self.rotated(self.norm(k, f"{name}.k_norm"), positions)
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v) * gate.sigmoid()
        return F.linear(out.flatten(1), self.tensors[f"{name}.o_proj.weight"])

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (
            self.tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        name = f"{LAYER}.mlp"
        if f"{name}.gate.weight" not in self.tensors:
            return self.mlp(x, name)
        scores = F.linear(x, self.tensors[f"{name}.gate.weight"]).softmax(-1)
        best, chosen = scores.topk(self.config.num_experts_per_tok, -1)
        best = best / best.sum(-1, keepdim=True)
        gate = F.linear(x, self.tensors[f"{name}.shared_expert_gate.weight"]).sigmoid()
        y = gate * self.mlp(x, f"{name}.shared_expert")
        for expert in range(scores.shape[1]):
            share = (best * (chosen == expert)).sum(-1, keepdim=True)
            y = y + share * self.mlp(x, f"{name}.experts.{expert}")
        return y

    def run(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits, hidden state) of the last position."""
        inputs = (
            self.norm(embeddings, "mtp.pre_fc_norm_embedding"),
            self.norm(hidden, "mtp.pre_fc_norm_hidden"),
        )
        x = F.linear(torch.cat(inputs, -1), self.tensors["mtp.fc.weight"])
        x = x + self.attention(self.norm(x, f"{LAYER}.input_layernorm"), positions)
        x = x + self.experts(self.norm(x, f"{LAYER}.post_attention_layernorm"))
        last = self.norm(x, "mtp.norm")[-1]
        return self.target.head(last), last

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self.tensors.get("mtp.embed_tokens.weight")
        shared = self.target.model.get_input_embeddings().weight
        return F.embedding(tokens, shared if own is None else own)

    def positions(self, tokens: list[int]) -> torch.Tensor:
        """Return positions [n, pairs] of tokens."""
        return torch.arange(len(tokens))[:, None]

    def given(self, tokens: list[int]) -> torch.Tensor:
        """Return the model's embeddings of tokens."""
        return self.embed(torch.tensor(tokens))

    @torch.no_grad()
    def drafts(self, tokens: list[int]) -> list[int]:
        """Return the greedy drafts that follow some tokens."""
        hidden, embeddings = self.target.states(tokens)[-1][:-1], self.given(tokens)[1:]
        found: list[int] = []
        for _ in range(MOST):
            positions = self.positions(tokens + found)[:-1]
            logits, last = self.run(embeddings, hidden, positions)
            found.append(int(logits.argmax()))
            hidden = torch.cat((hidden, last[None]))
            embeddings = torch.cat((embeddings, self.embed(torch.tensor(found[-1:]))))
        return found


Made = tuple[Path, LayerReference]


def add_layer(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a function from a case's name to its checkpoint and reference."""
    known: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in known:
            row, fields = CASES[name]
            family, settings = ARCHITECTURES[row]
            target = make_model(family, settings, seed=3)
            target.lm_head.weight.data = shrunk(target.lm_head.weight.data, LIKELY)
            folder = save(target, tmp_path_factory.mktemp("hybrid"))
            edit_json(folder / "config.json", **fields)
            has_table = fields.get("mtp_use_dedicated_embeddings", False)
            tensors = random_layer(target.config, has_table=has_table)
            stored = tensors
            if name == "qwen3.5-moe":  # and a second layer, which is not read
                stored = stacked(tensors) | {"mtp.layers.1.input_layernorm.weight": torch.ones(64)}
            add_layer(folder, stored)
            reference = LayerReference(TransformersTarget(target), target.config, tensors)
            known[name] = folder, reference
        return known[name]

    return get


def plain_answers(folder: Path, prompts: list[list[int]], **settings: Any) -> list[Answer]:
    llm = LLM(str(folder), **SETTINGS | settings)
    found = answers(llm, prompts, **GREEDY)
    llm.shutdown()
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3.5", {"max_num_batched_tokens": 24, "async_scheduling": True}),
        ("qwen3.5", {"num_gpu_blocks_override": 19, "block_size": 8, "max_model_len": 104}),
        ("qwen3-next", {}),
        ("qwen3-next", {"tensor_parallel_size": 2}),
        (
            "qwen3.5-moe",
            {"num_gpu_blocks_override": 19, "block_size": 8, "max_model_len": 104}
            | {"swap_space": 0.01, "async_scheduling": True},
        ),
    ],
    ids=["chunks that overlap", "recomputation", "experts", "ranks", "swap"],
)
def test_drafts_are_those_of_the_layer(made, name: str, settings: dict[str, Any]):
    """The second time, the beginnings of prompts are in the cache."""
    folder, reference = made(name)
    prompts = random_prompts(3, 70)
    expected = plain_answers(folder, prompts, max_model_len=104)
    llm = drafting_engine(folder, None, **{"max_model_len": 104} | settings, speculative_config=MTP)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == expected
        assert answers(llm, prompts[::-1], **GREEDY) == expected[::-1]
    llm.shutdown()
    assert require_reference_drafts(log, reference) > 30
    assert 0 < log.num_accepted < 0.9 * log.num_drafts
    new = [row for step, _ in log.steps for row in step.new_rows]
    is_tight = "num_gpu_blocks_override" in settings
    assert is_tight or max(row.num_computed_tokens for row in new) == 64
    assert (len(new) > 2 * len(prompts)) == is_tight
    assert any(step.swap_in for step, _ in log.steps) == ("swap_space" in settings)


class SeeingTarget(TransformersTarget):
    """A model with a tower, for prompts whose pictures are known by their tokens."""

    def __init__(self, model: torch.nn.Module, name: str, asked: tuple[Asked, ...]) -> None:
        super().__init__(model)
        found = [pictured.inputs_of(name, one) for one in asked]
        self._inputs = [(ids, inputs) for inputs, ids in found]

    def inputs(self, tokens: list[int]) -> dict[str, torch.Tensor]:
        """Return what the model reads: ids, pictures, and which tokens are of pictures."""
        own = next(inputs for ids, inputs in self._inputs if tokens[: len(ids)] == ids)
        ids = torch.tensor([tokens])
        return {"input_ids": ids, "mm_token_type_ids": (ids == pictured.PICTURE).int(), **own}

    def compute(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        given = self.inputs(tokens.tolist())
        found = self.model(**given, attention_mask=None, output_hidden_states=True).hidden_states
        return [one[0] for one in found]


class SeeingReference(LayerReference):
    """Reads pictures' rows, at positions on three axes, as vLLM's class does."""

    target: SeeingTarget

    def positions(self, tokens: list[int]) -> torch.Tensor:
        given = self.target.inputs(tokens)
        given.pop("pixel_values", None)
        found, _ = self.target.model.model.get_rope_index(**given)
        return found[:, 0][[0, 1, 2, 0]].T  # time, row, column, time: mrope_section is 2, 1, 1

    def given(self, tokens: list[int]) -> torch.Tensor:
        return self.target.states(tokens)[0]


def test_drafts_of_requests_with_pictures_are_those_of_the_layer(tmp_path, monkeypatch):
    """The checkpoint has a tower. Chunks of prompts end before, in and after pictures."""
    monkeypatch.setattr(pictures, "PicturePool", InlinePool)
    name, asked = "qwen3.5", (ASKED[0], ASKED[2])
    folder = pictured.save(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 5.0  # so that a row or column shows
    edit_json(folder / "config.json", **config)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    add_layer(folder, {"lm_head.weight": shrunk(head, LIKELY)})
    model = type(pictured.reference(name).module).from_pretrained(folder).eval()
    tensors = random_layer(model.config.text_config, has_table=False)
    add_layer(folder, tensors)
    target = SeeingTarget(model, name, asked)
    reference = SeeingReference(target, model.config.text_config, tensors)
    params, found = SamplingParams(**GREEDY), []
    for config in (None, MTP):
        settings = {"max_num_batched_tokens": 9, "max_num_seqs": 1, "speculative_config": config}
        llm = drafting_engine(folder, None, **settings)
        with logged_steps(llm) as log:
            outputs = llm.generate(pictured.prompts(asked), params, use_tqdm=False)
        found.append([one.outputs[0].token_ids for one in outputs])
        llm.shutdown()
    assert found[0] == found[1]
    assert require_reference_drafts(log, reference) > 8
    assert 0 < log.num_accepted < log.num_drafts


def test_layers_in_fp8_have_their_scales(made, tmp_path):
    """Projections and experts in blocks of FP8; fc, router and the model's layers are not."""
    folder, reference = made("qwen3-next")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rounded, stored = dict(reference.tensors), {}
    for name, weight in reference.tensors.items():
        if name.endswith("_proj.weight"):
            scales = torch.stack([rows.abs().max() / 448 for rows in weight.split(128)])[:, None]
            scale = scales.repeat_interleave(128, 0)[: len(weight)]
            values = (weight / scale).to(torch.float8_e4m3fn)
            stored |= {name: values, f"{name}_scale_inv": scales}
            rounded[name] = values.float() * scale
    add_layer(tmp_path, stored)
    in_full = ["lm_head", "mtp.fc", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.shared_expert_gate"]
    in_full += [f"model.layers.{index}" for index in range(reference.config.num_hidden_layers)]
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fields |= {"modules_to_not_convert": in_full}
    edit_json(tmp_path / "config.json", quantization_config=fields)
    prompts = random_prompts(2, 30)
    with only_pytorch("dequantized"):  # the kernels round x to 8 bits
        llm = drafting_engine(tmp_path, None, speculative_config=MTP)
        with logged_steps(llm) as log:
            assert answers(llm, prompts, **GREEDY) == plain_answers(folder, prompts)
        llm.shutdown()
    own = LayerReference(reference.target, reference.config, rounded)
    assert require_reference_drafts(log, own) > 10


@pytest.mark.parametrize("name", CASES)
def test_dry_run_counts_the_layer(made, name: str):
    folder, _ = made(name)
    config = EngineConfig.from_settings(
        {"device": "cpu", "dtype": "float32", "kv_cache_memory": 0.01, "speculative_config": MTP}
    )
    checkpoint = read_folder(folder, "target")
    result = estimate(checkpoint, config, find_device("cpu"), drafter_of(checkpoint, config))
    with few_measured_steps():
        info = Worker(config, folder).start(lambda phase, seconds: None)
    assert (result.num_blocks, result.cache) == (info.num_blocks, info.cache_bytes)
    assert 0.95 * result.weights <= info.weight_bytes < 1.25 * result.weights
    layer = sum(
        4 * tensor.size
        for tensor in checkpoint.tensors
        if tensor.name.startswith("mtp.") and "layers.1" not in tensor.name
    )
    assert result.drafter == layer


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3.5", {"mtp_num_hidden_layers": 1}, r"no tensors of the layer .* \(mtp.fc\)"),
        ("qwen3.5", {"mtp_num_hidden_layers": 0}, "has no layer that drafts"),
        ("qwen3-next", {"num_nextn_predict_layers": 0}, "has no layer that drafts"),
    ],
    ids=["left out", "none", "none of Qwen3-Next"],
)
def test_checkpoints_without_the_layer_are_refused_if_asked_for_it(tmp_path, name, fields, message):
    folder = save(make_model(*ARCHITECTURES[name]), tmp_path)
    edit_json(folder / "config.json", **fields)
    LLM(str(folder), **SETTINGS).shutdown()
    with pytest.raises(ConfigError, match=message):
        drafting_engine(folder, None, speculative_config=MTP)
    config = EngineConfig.from_settings({"speculative_config": MTP})
    with pytest.raises(ConfigError, match=message):
        drafter_of(read_folder(folder, "target"), config)


def test_checkpoints_that_lack_a_part_of_the_layer_are_refused(made, tmp_path):
    folder, _ = made("qwen3.5")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{LAYER}.self_attn.q_norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*: mtp.layers.0.self_attn.q_norm"):
        drafting_engine(tmp_path, None, speculative_config=MTP)


def test_drafts_on_the_gpus_runner(made, rerun_graphs, monkeypatch):
    """In Triton's interpreter, in padded graphs: prompts in chunks next to tokens of others."""
    monkeypatch.setattr("toolkit.models.recurrent.kernels_for", lambda device: TritonKernels())
    folder, reference = made("qwen3.5")
    first, second = random_prompts(2, 16)
    prompts, params = [first, second[:5]], GREEDY | {"max_tokens": 6}
    expected = [one.token_ids[:6] for one in plain_answers(folder, prompts)]
    settings = {"attention_backend": "torch", "max_num_batched_tokens": 14, "max_num_seqs": 2}
    config = MTP | {"num_speculative_tokens": 2}
    llm = drafting_engine(folder, None, **settings, speculative_config=config)
    with logged_steps(llm) as log:
        assert [one.token_ids for one in answers(llm, prompts, **params)] == expected
    assert require_reference_drafts(log, reference, 2) > 4
    assert log.num_drafts > log.num_accepted > 0
    assert engines.graphs(llm)
    llm.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_on_a_gpu(made, name: str, enforce_eager: bool):
    """Prompts in chunks. In fp32, sums differ too little to change a token."""
    folder, reference = made(name)
    settings = {
        "device": "cuda",
        "kv_cache_memory": None,
        "num_threads": None,
        "num_gpu_blocks_override": 128,
        "max_num_batched_tokens": 64,
        "enforce_eager": enforce_eager,
    }
    prompts = random_prompts(8, 70)
    expected = plain_answers(folder, prompts, **settings)
    llm = drafting_engine(folder, None, **settings, speculative_config=MTP)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == expected
        assert answers(llm, prompts, **GREEDY) == expected  # with prefixes in the cache
    assert bool(engines.graphs(llm)) == (not enforce_eager)
    llm.shutdown()
    assert require_reference_drafts(log, reference) > 50
    assert log.num_drafts > 100
