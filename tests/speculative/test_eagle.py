"""EAGLE and EAGLE-3: drafts are those of a plain reference; answers, those of plain decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.checkpoints import VOCAB
from tests.speculative.drafting import (
    SETTINGS,
    StepLog,
    answers,
    drafting_engine,
    few_measured_steps,
    logged_steps,
    random_prompts,
    save_llama,
)
from tests.speculative.plain import (
    Llama,
    Target,
    Tensors,
    attention,
    mlp,
    norm,
    shrink_unlikely,
    shrunk,
)
from toolkit import LLM, LoRARequest, SamplingParams
from toolkit.config import EngineConfig
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.drafters import drafter_of
from toolkit.inventory.estimate import estimate
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, MOST = 6, 64, 4, 2, 96, 4
HEAD_SIZE = HIDDEN // HEADS
LIKELY = list(range(65, 68))
"""Few tokens, so that some drafts of random weights are right."""
PARAMS = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
    "bias": False,
    "tie_word_embeddings": False,
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        name: torch.randn(shape) * 2 * shape[-1] ** -0.5
        if len(shape) > 1
        else torch.randn(shape) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def layer_shapes(name: str, inputs: int = 1) -> dict[str, tuple[int, ...]]:
    width, kv = inputs * HIDDEN, KV_HEADS * HEAD_SIZE
    return {
        f"{name}.self_attn.q_proj.weight": (HIDDEN, width),
        f"{name}.self_attn.k_proj.weight": (kv, width),
        f"{name}.self_attn.v_proj.weight": (kv, width),
        f"{name}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{name}.post_attention_layernorm.weight": (HIDDEN,),
        f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
    }


def eagle3_tensors(layer: str, *, own_embedding: bool = False) -> Tensors:
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), **layer_shapes(layer, inputs=2)}
    shapes |= {f"{layer}.hidden_norm.weight": (HIDDEN,)}
    shapes |= {f"{layer}.input_layernorm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    tokens = torch.arange(5, 256, 3).tolist()
    tokens = sorted({*tokens, *LIKELY})
    tensors = random_tensors(shapes | {"lm_head.weight": (len(tokens), HIDDEN)})
    likely = [tokens.index(one) for one in LIKELY]
    tensors["lm_head.weight"] = shrunk(tensors["lm_head.weight"], likely)
    tokens = torch.tensor(tokens)
    is_draft = torch.zeros(VOCAB, dtype=torch.bool)
    is_draft[tokens] = True
    return tensors | {"d2t": tokens - torch.arange(len(tokens)), "t2d": is_draft}


def eagle_tensors(num_layers: int, *, bias: bool) -> Tensors:
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if bias else {})
    for index in range(num_layers):
        shapes |= layer_shapes(f"layers.{index}")
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (HIDDEN,)
    return random_tensors(shapes | {"embed_tokens.weight": (VOCAB, HIDDEN)})


def write(folder: Path, tensors: Tensors, *, pickled: bool = False, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


# ---- the drafter as the papers describe it, over complete sequences, without a cache


@dataclass
class Reference:
    """Computes drafts of a sequence."""

    target: Target
    tensors: Tensors
    layers: Sequence[str]
    taps: Sequence[int] = ()  # EAGLE-3
    residual_is_norm: bool = False

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.tensors[f"{name}.weight"], CONFIG["rms_norm_eps"])

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return attention(x, self.tensors, name, HEADS, CONFIG["rope_theta"])

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return mlp(self.norm(x, f"{name}.post_attention_layernorm"), self.tensors, name)

    def features(self, tokens: list[int]) -> torch.Tensor:
        """Return what the drafter reads of the target's hidden states."""
        states = self.target.states(tokens)
        if not self.taps:
            return states[-1]
        return F.linear(torch.cat([states[i] for i in self.taps], 1), self.tensors["fc.weight"])

    def run(
        self, features: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits over the model's tokens, hidden state) of the last position."""
        own = self.tensors.get("embed_tokens.weight") if self.taps else None
        embeddings = F.embedding(tokens, self.target.embedding if own is None else own)
        if not self.taps:
            x = F.linear(
                torch.cat((embeddings, features), 1),
                self.tensors["fc.weight"],
                self.tensors.get("fc.bias"),
            )
            for index, name in enumerate(self.layers):
                y = self.norm(x, f"{name}.input_layernorm") if index else x
                x = x + self.attention(y, name)
                x = x + self.mlp(x, name)
            return self.target.head(x[-1]), x[-1]
        (name,), x = self.layers, features
        hidden = self.norm(x, f"{name}.hidden_norm")
        both = torch.cat((self.norm(embeddings, f"{name}.input_layernorm"), hidden), 1)
        x = (hidden if self.residual_is_norm else x) + self.attention(both, name)
        x = x + self.mlp(x, name)
        own_logits = F.linear(self.norm(x[-1], "norm"), self.tensors["lm_head.weight"])
        d2t = self.tensors["d2t"]
        logits = torch.full((VOCAB,), -torch.inf)
        logits[torch.arange(len(d2t)) + d2t] = own_logits
        return logits, x[-1]

    @torch.no_grad()
    def drafts(self, tokens: list[int]) -> list[int]:
        """Return the greedy drafts that follow some tokens."""
        features = self.features(tokens)[:-1]
        found: list[int] = []
        for _ in range(MOST):
            logits, hidden = self.run(features, torch.tensor((tokens + found)[1:]))
            found.append(int(logits.argmax()))
            features = torch.cat((features, hidden[None]))
        return found


class Drafts(Protocol):
    """A reference of any drafter."""

    def drafts(self, tokens: list[int]) -> list[int]: ...


def require_reference_drafts(log: StepLog, reference: Drafts, most: int = MOST) -> int:
    """Compare the drafts of all steps. Return how many were compared."""
    tokens: dict[int, list[int]] = {}
    pairs = []
    for step, output in log.steps:
        for new in step.new_rows:
            tokens[new.row] = list(new.token_ids)
        rows = step.rows[step.samples].tolist()
        counts = [1] * len(rows) if output.counts is None else output.counts.tolist()
        sampled = output.token_ids.tolist()
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[row] += sampled[:count]
            del sampled[:count]
            pairs.append(
                (list(tokens[row]), [one for one in output.drafts[at].tolist() if one >= 0])
            )
    pairs.sort(key=lambda pair: -len(pair[0]))  # a model's states are computed once for prefixes
    for known, found in pairs:
        assert found == reference.drafts(known)[:most]
    return len(pairs)


@pytest.fixture(scope="module")
def eagle_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return shrink_unlikely(save_llama(folder, seed=3, num_hidden_layers=LAYERS), LIKELY)


@pytest.fixture(scope="module")
def eagle_target(eagle_target_folder: Path) -> Llama:
    return Llama(eagle_target_folder)


Case = tuple[str, Callable[[Path], Path], Callable[[Llama], Reference]]


def published3(folder: Path) -> Path:
    return write(folder, eagle3_tensors("midlayer"), draft_vocab_size=86, pickled=True)


def speculators3(folder: Path) -> Path:
    tensors = eagle3_tensors("layers.0", own_embedding=True)
    write(folder, tensors)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 5, 0], "norm_before_residual": True}
    content = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(tensors["d2t"]),
        "transformer_layer_config": CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(content | ids))
    return folder


CASES: dict[str, Case] = {
    "eagle3": (
        "eagle3",
        published3,
        lambda target: Reference(target, eagle3_tensors("midlayer"), ["midlayer"], (2, 3, 3)),
    ),
    "eagle3 of speculators": (
        "eagle3",
        speculators3,
        lambda target: Reference(
            target, eagle3_tensors("layers.0", own_embedding=True), ["layers.0"], (1, 5, 0), True
        ),
    ),
    "eagle": (
        "eagle",
        lambda folder: write(folder, eagle_tensors(1, bias=True), pickled=True),
        lambda target: Reference(target, eagle_tensors(1, bias=True), ["layers.0"]),
    ),
    "eagle of two layers": (
        "eagle",
        lambda folder: write(folder, eagle_tensors(2, bias=False), num_hidden_layers=2),
        lambda target: Reference(target, eagle_tensors(2, bias=False), ["layers.0", "layers.1"]),
    ),
}


@pytest.fixture
def plain_answers(engine: Callable[..., LLM], eagle_target_folder: Path) -> Callable[..., list]:
    """Return a function from prompts, parameters and settings to answers without drafts."""

    def get(prompts: list[list[int]], params: dict, **settings: object) -> list:
        return answers(engine(eagle_target_folder, **SETTINGS | settings), prompts, **params)

    return get


@pytest.mark.parametrize(
    ("case", "settings"),
    zip(CASES, itertools.cycle([{"max_num_batched_tokens": 16}, {}]), strict=False),
    ids=str,
)
def test_drafts_are_those_of_the_paper(
    case: str,
    settings: dict,
    tmp_path: Path,
    eagle_target: Llama,
    eagle_target_folder: Path,
    plain_answers,
):
    """The second time, prefixes are in the cache."""
    method, write_drafter, make_reference = CASES[case]
    llm = drafting_engine(
        eagle_target_folder, write_drafter(tmp_path), method, MOST, **settings, block_size=8
    )
    reference, prompts = make_reference(eagle_target), random_prompts(2, 37)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **PARAMS) == plain_answers(prompts, PARAMS)
    assert require_reference_drafts(log, reference) > 15
    assert 0 < log.num_accepted < 0.9 * log.num_drafts
    params = PARAMS | {"max_tokens": 9, "repetition_penalty": 1.2}  # which drafts disregard
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == plain_answers(prompts, params)
    assert require_reference_drafts(log, reference) > 12
    assert min(new.num_computed_tokens for step, _ in log.steps for new in step.new_rows) >= 32
    llm.shutdown()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("eagle3", {"num_gpu_blocks_override": 16, "block_size": 8, "swap_space": 0.001}),
        ("eagle", {"num_gpu_blocks_override": 16, "block_size": 8}),
        ("eagle3", {"block_size": 2, "async_scheduling": True}),
    ],
    ids=["swap", "recomputation", "small blocks"],
)
def test_drafts_survive_preemption(
    method: str,
    settings: dict,
    tmp_path: Path,
    eagle_target: Llama,
    eagle_target_folder: Path,
    plain_answers,
):
    _, write_drafter, make_reference = CASES[method]
    given = {"max_model_len": 120, **settings}
    llm = drafting_engine(eagle_target_folder, write_drafter(tmp_path), method, MOST, **given)
    prompts = random_prompts(3, 40)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **PARAMS) == plain_answers(prompts, PARAMS)
    llm.shutdown()
    assert require_reference_drafts(log, make_reference(eagle_target)) > 30
    num_placed = sum(len(step.new_rows) for step, _ in log.steps)
    assert (num_placed > len(prompts)) == ("num_gpu_blocks_override" in settings)
    assert any(step.swap_in for step, _ in log.steps) == ("swap_space" in settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("eagle3", {"quantization": "int8"}),
        ("eagle", {"kv_cache_dtype": "fp8"}),
        ("eagle", {"attention_backend": "torch"}),
        ("eagle3", {"load_format": "dummy"}),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else given,
)
def test_drafters_combine(
    method: str, settings: dict, tmp_path: Path, eagle_target_folder: Path, plain_answers
):
    _, write_drafter, _ = CASES[method]
    llm = drafting_engine(eagle_target_folder, write_drafter(tmp_path), method, MOST, **settings)
    prompts, params = random_prompts(2, seed=1), PARAMS | {"max_tokens": 16}
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == plain_answers(prompts, params, **settings)
    llm.shutdown()
    assert log.num_drafts > 20


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_ranks_share_the_network(
    method: str, tmp_path: Path, eagle_target: Llama, eagle_target_folder: Path, plain_answers
):
    _, write_drafter, make_reference = CASES[method]
    llm = drafting_engine(
        eagle_target_folder, write_drafter(tmp_path), method, MOST, tensor_parallel_size=2
    )
    prompts, params = random_prompts(2), PARAMS | {"max_tokens": 12}
    with logged_steps(llm) as log:
        found = answers(llm, prompts, **params)
    llm.shutdown()
    assert require_reference_drafts(log, make_reference(eagle_target)) > 8
    assert found == plain_answers(prompts, params)


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_adapters_change_no_drafts(
    method: str, tmp_path: Path, eagle_target: Llama, eagle_target_folder: Path
):
    """The drafter shares tables that adapters may change."""
    _, write_drafter, make_reference = CASES[method]
    folder = tmp_path / "adapter"
    folder.mkdir()
    modules = {"lm_head": VOCAB, "model.layers.0.self_attn.o_proj": HIDDEN}
    config = {"r": 2, "lora_alpha": 8, "peft_type": "LORA", "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, rows in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, HIDDEN)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    loras = [LoRARequest("own", 1, str(folder)), None]
    plain = drafting_engine(eagle_target_folder, None, enable_lora=True)
    llm = drafting_engine(
        eagle_target_folder, write_drafter(tmp_path / "drafter"), method, MOST, enable_lora=True
    )
    prompts, params = random_prompts(2), PARAMS | {"max_tokens": 12}
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [
        [
            list(output.outputs[0].token_ids)
            for output in one.generate(
                requests, SamplingParams(**params), lora_request=loras, use_tqdm=False
            )
        ]
        for one in (llm, plain)
    ]
    assert found[0] == found[1]
    with logged_steps(llm) as log:  # without adapters, after them
        answers(llm, prompts, **params)
    assert require_reference_drafts(log, make_reference(eagle_target)) > 8
    plain.shutdown()
    llm.shutdown()


@pytest.mark.parametrize("method", ["eagle3", "eagle3 of speculators", "eagle of two layers"])
def test_dry_run_counts_the_network(method: str, tmp_path: Path, eagle_target_folder: Path):
    name, write_drafter, _ = CASES[method]
    given = {"method": name, "model": str(write_drafter(tmp_path))}
    config = EngineConfig.from_settings(
        {"device": "cpu", "dtype": "float32", "kv_cache_memory": 0.01, "speculative_config": given}
    )
    checkpoint = read_folder(eagle_target_folder, "target")
    result = estimate(checkpoint, config, find_device("cpu"), drafter_of(checkpoint, config))
    with few_measured_steps():
        info = Worker(config, eagle_target_folder).start(lambda phase, seconds: None)
    assert (result.num_blocks, result.cache) == (info.num_blocks, info.cache_bytes)
    assert 0.95 * result.weights <= info.weight_bytes < 1.25 * result.weights


def drop(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = eagle3_tensors("midlayer")
        del tensors[name]
        write(folder, tensors, draft_vocab_size=86)

    return change


def shift_tokens(folder: Path) -> None:
    tensors = eagle3_tensors("midlayer")
    tensors["d2t"] += 100
    write(folder, tensors, draft_vocab_size=86)


REFUSED = {
    "lacks 1 of 15 tensors: norm.weight": ("eagle3", drop("norm.weight")),
    "no tensor fc.weight: its layout is not that of EAGLE": ("eagle3", drop("fc.weight")),
    "no tensor d2t": ("eagle3", drop("d2t")),
    "d2t has the shape .86.; config.json requires .99.": (
        "eagle3",
        lambda folder: write(folder, eagle3_tensors("midlayer"), draft_vocab_size=99),
    ),
    "it is a drafter of EAGLE-3: use the method eagle3": ("eagle", published3),
    "it is a drafter of EAGLE: use the method eagle": (
        "eagle3",
        lambda folder: write(folder, eagle_tensors(1, bias=True)),
    ),
    "has hidden size 32, and": (
        "eagle3",
        lambda folder: write(
            folder, eagle3_tensors("midlayer"), draft_vocab_size=86, hidden_size=32
        ),
    ),
    "reads layers .*9.*, and the model has 6": (
        "eagle3",
        lambda folder: write(
            folder,
            eagle3_tensors("midlayer"),
            draft_vocab_size=86,
            eagle_aux_hidden_state_layer_ids=[1, 2, 9],
        ),
    ),
    "d2t names token": ("eagle3", shift_tokens),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unfit_drafters_are_refused(message: str, tmp_path: Path, eagle_target_folder: Path):
    method, write_drafter = REFUSED[message]
    write_drafter(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        drafting_engine(eagle_target_folder, tmp_path, method)


def test_models_without_taps_are_refused(tmp_path: Path, eagle_target_folder: Path):
    with pytest.raises(ConfigError, match="reads hidden states, which tk does not have"):
        drafting_engine(
            eagle_target_folder, published3(tmp_path), "eagle3", model_impl="transformers"
        )
