"""A mix that tk does not know, with a state for each request, against whole sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests import checkpoints, engines
from tests.checkpoints import VOCAB
from tests.models import gated_mix
from tests.models.own_models import NAME, make_checkpoint
from tests.speculative.drafting import logged_steps
from toolkit import LLM
from toolkit.attention import AttentionBatch
from toolkit.config import EngineConfig
from toolkit.errors import CheckpointError, ConfigError, EngineError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate
from toolkit.models.describe import Branch, Decoder
from toolkit.models.parts import attention
from toolkit.worker.kv_cache import KVCache

HIDDEN, COUNT, LAYERS = 64, 20, 3
PROMPTS = [[(5 * i + k) % VOCAB for i in range(3 * k)] for k in (4, 7, 9)]


def describe_hybrid(config: Any) -> Decoder:
    """Describe the second layer with attention in the place of its mix."""
    described = gated_mix.describe(config)
    (branch,), mlp = described.layers[1]
    attn = Branch(attention(config, "model.layers.1.attn"), branch.norm)
    layers = [described.layers[0], ((attn,), mlp), described.layers[2]]
    return dataclasses.replace(described, layers=layers)


@pytest.fixture(params=["alone", "hybrid"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint with random weights."""
    describe = gated_mix.describe if request.param == "alone" else describe_hybrid
    return make_checkpoint(
        tmp_path,
        monkeypatch,
        describe,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return the logits after each token, [num_tokens, vocab], in float64."""
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    eps = read_folder(folder, NAME).config.rms_norm_eps

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), w[f"{name}.weight"], eps)

    def recurrent(x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = (product(x, f"{name}.{part}").view(len(x), 4, 8) for part in "qkv")
        # The state's decay from token j to token i is the product of the gates after j.
        gates = product(x, f"{name}.gate").sigmoid().log().cumsum(0)
        decay = (gates[:, None] - gates[None]).exp().permute(2, 0, 1).tril()
        scores = torch.einsum("ihd,jhd->hij", q, k) * decay
        return product(torch.einsum("hij,jhd->ihd", scores, v).flatten(1), f"{name}.out")

    def attend(x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = (
            product(x, f"{name}.{part}_proj").view(1, len(x), -1, 16).transpose(1, 2)
            for part in "qkv"
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return product(out[0].transpose(0, 1).flatten(1), f"{name}.o_proj")

    x = w["model.embed_tokens.weight"][tokens]
    for index in range(LAYERS):
        name = f"model.layers.{index}"
        is_attention = f"{name}.attn.q_proj.weight" in w
        mix = attend if is_attention else recurrent
        x = x + mix(norm(x, f"{name}.norm1"), f"{name}.attn" if is_attention else name)
        y = norm(x, f"{name}.norm2")
        gate, up = (product(y, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + product(F.silu(gate) * up, f"{name}.mlp.down_proj")
    return product(norm(x, "model.norm"), "lm_head")


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """Return the likeliest tokens, by whole sequences."""
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(logits(folder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 80},
        {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 8},
        {"num_gpu_blocks_override": 18, "swap_space": 0.01},
    ],
    ids=["plain", "chunks", "preemption"],
)
def test_states_give_the_right_tokens(folder: Path, settings: dict[str, Any], device: str) -> None:
    given = {"device": device, "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    llm = LLM(str(folder), **given, **settings)
    num_preempted = engines.count_stats(llm, "num_preemptions")
    expected = [greedy(folder, prompt) for prompt in PROMPTS]
    for _ in range(2):  # rows are used again
        outputs = checkpoints.generate(llm, PROMPTS, max_tokens=COUNT, ignore_eos=True)
        assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        assert [one.num_cached_tokens for one in outputs] == [0, 0, 0]
    assert (num_preempted() > 0) == ("swap_space" in settings)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_num_seqs", [5, 4, 3])
def test_several_answers_begin_with_the_leaders_state(
    folder: Path, device: str, max_num_seqs: int
) -> None:
    """After 64 of 70 tokens. Without a slot for it alone, the last sibling takes it over."""
    given = {"device": device, "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 80}
    given |= {"max_num_seqs": max_num_seqs, "state_cache_gib": 0.0}
    llm = LLM(str(folder), **given, max_num_batched_tokens=20)
    prompt, n, num_shared = [(5 * i + 9) % VOCAB for i in range(70)], 3, 64
    with logged_steps(llm) as log:
        [outputs] = checkpoints.generate(llm, [prompt], max_tokens=COUNT, n=n)
    expected = greedy(folder, prompt)
    assert [list(one.token_ids) for one in outputs.outputs] == [expected] * n
    num_computed = sum(step.total_tokens for step, _ in log.steps)
    assert num_computed == n * (len(prompt) + COUNT - 1) - (n - 1) * num_shared


def test_several_answers_have_states_of_their_own(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=3)
    [both] = checkpoints.generate(llm, PROMPTS[:1], max_tokens=COUNT, ignore_eos=True, n=2)
    assert [list(one.token_ids) for one in both.outputs] == [greedy(folder, PROMPTS[0])] * 2
    [sampled] = checkpoints.generate(
        llm,
        PROMPTS[:1],
        max_tokens=COUNT,
        ignore_eos=True,
        n=3,
        temperature=1.0,
        seed=1,
        logprobs=0,
    )
    assert len({one.token_ids[0] for one in sampled.outputs}) > 1
    for one in sampled.outputs:
        expected = logits(folder, [*PROMPTS[0], *one.token_ids]).log_softmax(-1)
        first = len(PROMPTS[0]) - 1
        for nth, (token, found) in enumerate(zip(one.token_ids, one.logprobs or [], strict=True)):
            assert found[token].logprob == pytest.approx(
                float(expected[first + nth, token]), abs=1e-3
            )


def test_estimate_is_that_of_the_worker(folder: Path) -> None:
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8}
    llm = LLM(str(folder), **settings)
    config = EngineConfig.from_settings(settings)
    found = estimate(read_folder(folder, NAME), config, find_device("cpu"))
    assert (found.num_blocks, found.cache) == (llm.info.num_blocks, llm.info.cache_bytes)
    assert found.fits
    is_hybrid = found.block_bytes > 0
    states = {
        keeper.states.shape
        for keeper in engines.model(llm).keepers()
        if isinstance(keeper, gated_mix.GatedMix)
    }
    requests, snapshots, num_bytes = found.states
    assert (requests, snapshots > 0) == (8, True)
    assert states == {(1 + requests + snapshots, 4, 64)}
    assert num_bytes == 4 * 64 * 4 * sum(
        hasattr(one, "states") for one in engines.model(llm).keepers()
    )
    assert is_hybrid == any(hasattr(one, "k_cache") for one in engines.model(llm).keepers())


def test_commands_describe_it(folder: Path, tk_here: Callable[..., Any]) -> None:
    settings = ("--device", "cpu", "--max-num-seqs", "8")
    done = tk_here("serve", str(folder), "--dry-run", *settings)
    assert (done.returncode, done.stderr) == (0, "It fits.\n")
    assert "OwnForCausalLM" in tk_here("show", str(folder)).stdout
    shown = tk_here("show", str(folder), "--layers").stdout
    assert "keeps 4 x 64 numbers for each request" in shown


def test_drafts_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="keep a state for each request, which drafts would"):
        LLM(str(folder), device="cpu", speculative_config={"method": "ngram"})


def test_a_mix_may_read_its_slots_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step is tried as a recording, whose batch has the slots, too."""
    forward = gated_mix.GatedMix.forward

    def read_first(mix: Any, x: Any, batch: AttentionBatch) -> torch.Tensor:
        assert batch.states.reads.tolist() == batch.states.writes.tolist()
        return forward(mix, x, batch)

    monkeypatch.setattr(gated_mix.GatedMix, "forward", read_first)
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    [output] = checkpoints.generate(llm, PROMPTS[:1], max_tokens=COUNT)
    assert list(output.outputs[0].token_ids) == greedy(folder, PROMPTS[0])


def test_a_state_that_is_not_reset_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests, a new row is full of NaN."""
    monkeypatch.setattr(
        AttentionBatch, "is_first", property(lambda batch: torch.zeros(len(batch.rows)) > 0)
    )
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    with pytest.raises(EngineError, match="not finite"):
        checkpoints.generate(llm, PROMPTS[:1], max_tokens=4)


def test_blocks_that_are_read_before_they_are_written_show(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tests, new blocks are full of NaN."""
    monkeypatch.setattr(KVCache, "copy_in", lambda cache, pairs: None)
    settings = {"num_gpu_blocks_override": 12, "block_size": 4, "swap_space": 0.01}
    llm = LLM(str(checkpoint("llama3-gqa")), device="cpu", max_model_len=48, **settings)
    with pytest.raises(EngineError, match="not finite"):
        checkpoints.generate(llm, PROMPTS, max_tokens=COUNT, ignore_eos=True)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("", "Gated has no module: its field `module` must be 'package.module:class'; got ''"),
        ("tests.models.gated_mix", "got 'tests.models.gated_mix'"),
        (":GatedMix", "got ':GatedMix'"),
        ("nowhere:Mix", "the module of Gated, nowhere:Mix, cannot be loaded: No module named"),
        ("tests.models.gated_mix:Other", "cannot be loaded: .* has no attribute 'Other'"),
    ],
)
def test_a_mix_without_a_usable_module_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    monkeypatch.setattr(gated_mix.Gated, "module", module)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(folder), device="cpu")
