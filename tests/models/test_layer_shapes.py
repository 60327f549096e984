"""A model whose layers keep keys and values of three shapes, against plain attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests import checkpoints, engines
from tests.checkpoints import VOCAB
from tests.models.own_models import NAME, make_checkpoint
from toolkit import LLM
from toolkit.config import EngineConfig
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate
from toolkit.models.architectures import llama
from toolkit.models.decoder import Taps
from toolkit.models.describe import Attention, Decoder
from toolkit.models.parts import decoder, gated_mlp, pre_norm, rms_norm
from toolkit.weights.source import Source

HIDDEN, COUNT = 64, 24
SHAPES = ((4, 2, 16), (4, 4, 32), (2, 1, 64), (4, 2, 16))
"""Heads, KV heads and size of each layer. Another layer follows, an MLP alone."""


def describe(config: llama.Config) -> Decoder:
    def layer(name: str, index: int) -> Any:
        heads, kv_heads, size = SHAPES[min(index, len(SHAPES) - 1)]
        parts = (Source(f"{name}.self_attn.{part}_proj") for part in "qkvo")
        steps = pre_norm(
            Attention(heads, kv_heads, size, *parts, scale=size**-0.5),
            rms_norm(config, f"{name}.input_layernorm"),
            gated_mlp(config, f"{name}.mlp"),
            rms_norm(config, f"{name}.post_attention_layernorm"),
        )
        return steps if index < len(SHAPES) else steps[1:]

    return decoder(config, layer, rms_norm(config, "model.norm"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint with random weights."""
    return make_checkpoint(
        tmp_path,
        monkeypatch,
        describe,
        gain=2.0,
        hidden_size=HIDDEN,
        num_hidden_layers=len(SHAPES) + 1,
    )


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest tokens, by whole sequences in float64."""
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    eps = read_folder(folder, NAME).config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), w[f"{name}.weight"], eps)

    def attend(y: torch.Tensor, name: str, heads: int, kv_heads: int, size: int) -> torch.Tensor:
        q, k, v = (
            (y @ w[f"{name}.self_attn.{part}_proj.weight"].T).view(len(y), -1, size)
            for part in "qkv"
        )
        k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        mask = torch.ones(len(y), len(y), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return out @ w[f"{name}.self_attn.o_proj.weight"].T

    tokens = list(prompt)
    for _ in range(count):
        x = w["model.embed_tokens.weight"][tokens]
        for index in range(len(SHAPES) + 1):
            name = f"model.layers.{index}"
            if index < len(SHAPES):
                x = x + attend(norm(x, f"{name}.input_layernorm"), name, *SHAPES[index])
            y = norm(x, f"{name}.post_attention_layernorm")
            gate, up = (y @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        tokens.append(int((norm(x[-1], "model.norm") @ w["lm_head.weight"].T).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 60},
        {"num_gpu_blocks_override": 20, "swap_space": 0.01},
        {"attention_backend": "torch", "num_gpu_blocks_override": 60},
    ],
    ids=["chunks and hits", "swap", "torch"],
)
def test_layers_of_several_shapes_give_the_right_tokens(
    folder: Path, settings: dict[str, Any], device: str
) -> None:
    shared = [(7 * i) % VOCAB for i in range(20)]
    prompts = [[*shared, *(i % VOCAB for i in range(k, 3 * k))] for k in (3, 5, 9)]
    llm = LLM(str(folder), device=device, dtype="float32", block_size=4, max_num_seqs=4, **settings)
    schedule, num_swapped = engines.scheduler(llm).schedule, 0

    def count() -> Any:
        nonlocal num_swapped
        step = schedule()
        num_swapped += 0 if step is None else len(step.swap_out)
        return step

    engines.scheduler(llm).schedule = count
    expected = [greedy(folder, prompt, COUNT) for prompt in prompts]
    for _ in range(2):  # the second time, prompts are in the cache
        outputs = checkpoints.generate(llm, prompts, max_tokens=COUNT, ignore_eos=True)
        assert [list(one.outputs[0].token_ids) for one in outputs] == expected
    if "swap_space" in settings:
        assert num_swapped
    else:
        assert outputs[0].num_cached_tokens >= len(shared)


def test_each_layer_has_tensors_of_its_shape(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", block_size=4, num_gpu_blocks_override=9)
    bound = [keeper.k_cache.shape for keeper in engines.model(llm).keepers()]
    assert bound == [(9, 4, kv_heads, size) for _, kv_heads, size in SHAPES]
    addresses = {keeper.k_cache.data_ptr() for keeper in engines.model(llm).keepers()}
    assert len(addresses) == len(SHAPES)


def test_estimate_is_that_of_the_worker(folder: Path) -> None:
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 0.01}
    info = LLM(str(folder), **settings).info
    config = EngineConfig.from_settings(settings)
    found = estimate(read_folder(folder, NAME), config, find_device("cpu"))
    assert (found.num_blocks, found.cache) == (info.num_blocks, info.cache_bytes)
    numbers = sum(2 * kv_heads * size for _, kv_heads, size in SHAPES)
    assert found.block_bytes == 16 * 4 * numbers


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_drafters_read_layers_around_the_last_that_attends(folder: Path, layer: int) -> None:
    prompt = [(7 * i) % VOCAB for i in range(20)]
    llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=64)
    taps = engines.model(llm).taps = Taps((layer,), output=False)
    (output,) = checkpoints.generate(llm, [prompt], max_tokens=1, ignore_eos=True)
    assert list(output.outputs[0].token_ids) == greedy(folder, prompt, 1)
    states = taps.take(slice(0, len(prompt)))
    assert len(states.unique(dim=0)) == len(prompt), "every token has its own"
