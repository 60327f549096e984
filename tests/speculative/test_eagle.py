"""EAGLE and EAGLE-3: drafts are those of a plain reference; answers, those of plain decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.checkpoints import VOCAB, make_model, save
from tests.speculative.drafting import (
    LLAMA,
    StepLog,
    answers,
    drafting_engine,
    logged_steps,
    random_prompts,
)
from toolkit import LoRARequest, SamplingParams
from toolkit.config import EngineConfig
from toolkit.errors import CheckpointError, ConfigError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.dry_run import drafter_of
from toolkit.inventory.estimate import estimate
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, MOST = 6, 64, 4, 2, 96, 4
HEAD_SIZE = HIDDEN // HEADS
ALLOWED = list(range(65, 68))
"""Few tokens, so that some drafts of random weights are right."""
PARAMS = {
    "temperature": 0.0,
    "max_tokens": 28,
    "ignore_eos": True,
    "allowed_token_ids": ALLOWED,
    "repetition_penalty": 1.2,
}
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
Tensors = dict[str, torch.Tensor]


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
    tokens = torch.tensor(sorted({*tokens, *ALLOWED}))
    tensors = random_tensors(shapes | {"lm_head.weight": (len(tokens), HIDDEN)})
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

    target: torch.nn.Module
    tensors: Tensors
    layers: Sequence[str]
    taps: Sequence[int] = ()  # EAGLE-3
    residual_is_norm: bool = False

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        return x * self.tensors[f"{name}.weight"]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = HEAD_SIZE // 2
        angles = torch.outer(
            torch.arange(len(x)).float(),
            CONFIG["rope_theta"] ** (-torch.arange(half).float() / half),
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = (
            F.linear(x, self.tensors[f"{name}.self_attn.{part}_proj.weight"]).view(
                len(x), -1, HEAD_SIZE
            )
            for part in "qkv"
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_SIZE**-0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return F.linear(out, self.tensors[f"{name}.self_attn.o_proj.weight"])

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (
            F.linear(x, self.tensors[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up")
        )
        return F.linear(F.silu(gate) * up, self.tensors[f"{name}.mlp.down_proj.weight"])

    def run(
        self, features: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits over the model's tokens, hidden state) of the last position."""
        own = self.tensors.get("embed_tokens.weight") if self.taps else None
        table = self.target.get_input_embeddings().weight if own is None else own
        embeddings = F.embedding(tokens, table)
        if not self.taps:
            x = F.linear(
                torch.cat((embeddings, features), 1),
                self.tensors["fc.weight"],
                self.tensors.get("fc.bias"),
            )
            for index, name in enumerate(self.layers):
                y = self.norm(x, f"{name}.input_layernorm") if index else x
                x = x + self.attention(y, name)
                x = x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), name)
            return self.target.lm_head(x[-1]), x[-1]
        (name,), x = self.layers, features
        hidden = self.norm(x, f"{name}.hidden_norm")
        both = torch.cat((self.norm(embeddings, f"{name}.input_layernorm"), hidden), 1)
        x = (hidden if self.residual_is_norm else x) + self.attention(both, name)
        x = x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), name)
        own_logits = F.linear(self.norm(x[-1], "norm"), self.tensors["lm_head.weight"])
        d2t = self.tensors["d2t"]
        logits = torch.full((VOCAB,), -torch.inf)
        logits[torch.arange(len(d2t)) + d2t] = own_logits
        return logits, x[-1]

    @torch.no_grad()
    def drafts(self, tokens: list[int], params: dict) -> list[int]:
        """Return the greedy drafts that follow some tokens, with the request's parameters."""
        ids = torch.tensor(tokens)
        states = self.target(ids[None], output_hidden_states=True).hidden_states
        features = (
            F.linear(torch.cat([states[i][0] for i in self.taps], 1), self.tensors["fc.weight"])
            if self.taps
            else states[-1][0]  # after the last norm
        )[:-1]
        found: list[int] = []
        for _ in range(MOST):
            logits, hidden = self.run(features, torch.tensor((tokens + found)[1:]))
            seen = torch.tensor(sorted(set(tokens + found)))
            penalty = params["repetition_penalty"]
            part = logits[seen]
            logits[seen] = torch.where(part > 0, part / penalty, part * penalty)
            allowed = params.get("allowed_token_ids", range(VOCAB))
            found.append(max(allowed, key=lambda token: float(logits[token])))
            features = torch.cat((features, hidden[None]))
        return found


def require_reference_drafts(
    log: StepLog, reference: Reference, params: dict = PARAMS, most: int = MOST
) -> int:
    """Compare the drafts of all steps. Return how many were compared."""
    tokens, compared = {}, 0
    for step, output in log.steps:
        for new in step.new_rows:
            tokens[new.row] = list(new.token_ids)
        rows = step.rows[step.samples].tolist()
        counts = [1] * len(rows) if output.counts is None else output.counts.tolist()
        sampled = output.token_ids.tolist()
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[row] += sampled[:count]
            del sampled[:count]
            found = [token for token in output.drafts[at].tolist() if token >= 0]
            assert found == reference.drafts(tokens[row], params)[:most]
            compared += 1
    return compared


@pytest.fixture(scope="module")
def eagle_target() -> torch.nn.Module:
    return make_model("Llama", LLAMA | {"num_hidden_layers": LAYERS}, seed=3)


@pytest.fixture(scope="module")
def eagle_target_folder(
    eagle_target: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return save(eagle_target, tmp_path_factory.mktemp("target"))


Case = tuple[str, Callable[[Path], Path], Callable[[torch.nn.Module], Reference]]


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


@pytest.mark.parametrize(
    ("case", "settings"),
    zip(CASES, itertools.cycle([{"max_num_batched_tokens": 16}, {}]), strict=False),
    ids=str,
)
def test_drafts_are_those_of_the_paper(
    case: str,
    settings: dict,
    tmp_path: Path,
    eagle_target: torch.nn.Module,
    eagle_target_folder: Path,
):
    method, write_drafter, make_reference = CASES[case]
    plain = drafting_engine(eagle_target_folder, None)
    llm = drafting_engine(
        eagle_target_folder, write_drafter(tmp_path), method, MOST, **settings, block_size=8
    )
    reference, prompts = make_reference(eagle_target), random_prompts(2, 37)
    expected = answers(plain, prompts, **PARAMS)
    for _ in range(2):  # the second time, prefixes are in the cache
        with logged_steps(llm) as log:
            assert answers(llm, prompts, **PARAMS) == expected
        assert require_reference_drafts(log, reference) > 20
        assert 5 < log.num_accepted < 0.9 * log.num_drafts
    assert min(new.num_computed_tokens for step, _ in log.steps for new in step.new_rows) >= 32
    params = {key: value for key, value in PARAMS.items() if key != "allowed_token_ids"}
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == answers(plain, prompts, **params)
    assert require_reference_drafts(log, reference, params) > 20


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
    eagle_target: torch.nn.Module,
    eagle_target_folder: Path,
):
    _, write_drafter, make_reference = CASES[method]
    given = {"max_model_len": 120, **settings}
    plain = drafting_engine(eagle_target_folder, None, **given)
    llm = drafting_engine(eagle_target_folder, write_drafter(tmp_path), method, MOST, **given)
    prompts = random_prompts(4, 40)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **PARAMS) == answers(plain, prompts, **PARAMS)
    assert require_reference_drafts(log, make_reference(eagle_target)) > 40


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
def test_drafters_combine(method: str, settings: dict, tmp_path: Path, eagle_target_folder: Path):
    _, write_drafter, _ = CASES[method]
    found = []
    for drafter in (None, write_drafter(tmp_path)):
        llm = drafting_engine(eagle_target_folder, drafter, method, MOST, **settings)
        found.append(answers(llm, random_prompts(2), **PARAMS))
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_ranks_share_the_network(
    method: str, tmp_path: Path, eagle_target: torch.nn.Module, eagle_target_folder: Path
):
    _, write_drafter, make_reference = CASES[method]
    llm = drafting_engine(
        eagle_target_folder, write_drafter(tmp_path), method, MOST, tensor_parallel_size=2
    )
    with logged_steps(llm) as log:
        found = answers(llm, random_prompts(2), **PARAMS)
    llm.shutdown()
    assert require_reference_drafts(log, make_reference(eagle_target)) > 20
    assert found == answers(drafting_engine(eagle_target_folder, None), random_prompts(2), **PARAMS)


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_adapters_change_no_drafts(
    method: str, tmp_path: Path, eagle_target: torch.nn.Module, eagle_target_folder: Path
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
    prompts = random_prompts(2)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [
        [
            list(output.outputs[0].token_ids)
            for output in one.generate(
                requests, SamplingParams(**PARAMS), lora_request=loras, use_tqdm=False
            )
        ]
        for one in (llm, plain)
    ]
    assert found[0] == found[1]
    with logged_steps(llm) as log:  # without adapters, after them
        answers(llm, prompts, **PARAMS)
    assert require_reference_drafts(log, make_reference(eagle_target)) > 20


@pytest.mark.parametrize("method", ["eagle3", "eagle3 of speculators", "eagle of two layers"])
def test_dry_run_counts_the_network(method: str, tmp_path: Path, eagle_target_folder: Path):
    name, write_drafter, _ = CASES[method]
    given = {"method": name, "model": str(write_drafter(tmp_path))}
    config = EngineConfig.from_settings(
        {"device": "cpu", "dtype": "float32", "kv_cache_memory": 0.01, "speculative_config": given}
    )
    checkpoint = read_folder(eagle_target_folder, "target")
    result = estimate(checkpoint, config, find_device("cpu"), drafter_of(checkpoint, config))
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
