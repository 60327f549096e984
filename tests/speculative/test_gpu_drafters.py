"""Drafters with a model on the GPU's runner, in Triton's interpreter: drafts of plain references.

`test_gpu_runner` has the options of requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_model, save
from tests.speculative.drafting import (
    LLAMA,
    StepLog,
    answers,
    drafting_engine,
    logged_steps,
    random_prompts,
)
from tests.speculative.test_eagle import (
    LAYERS,
    Reference,
    eagle3_tensors,
    eagle_tensors,
    require_reference_drafts,
    write,
)
from toolkit import LLM
from toolkit.errors import ConfigError
from toolkit.scheduler.speculation import StepCosts

LIKELY = [65, 66, 67]
MOST = 3
LENGTHS = (9, 22, 50, 61, 140)
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True}
SETTINGS = {
    "attention_backend": "torch",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
}


@pytest.fixture
def on_gpu(gpu_runner: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return a function that makes an engine with the GPU's runner."""

    def make(*args: object, **settings: object) -> object:
        llm = drafting_engine(*args, **SETTINGS | settings)
        assert type(llm._core.executor._worker.runner).__name__ == "CudaRunner"
        return llm

    return make


def plain_answers(target: Path, prompts: list[list[int]], *params: dict, **settings) -> list:
    """Complete prompts with the CPU's runner, without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.worker.worker.kernels_for", lambda device: None)
        llm = drafting_engine(target, None, **SETTINGS | settings)
        assert type(llm._core.executor._worker.runner).__name__ == "ModelRunner"
        found = [answers(llm, prompts, **one) for one in params]
        llm.shutdown()
    return found


def shrink_unlikely(weight: torch.Tensor, likely: list[int]) -> None:
    """Scale rows of an output head, so that few tokens are likely, and some drafts right."""
    scale = torch.full((len(weight), 1), 0.05)
    scale[likely] = 1.0
    with torch.no_grad():
        weight *= scale


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    model = make_model("Llama", LLAMA | {"num_hidden_layers": LAYERS}, seed=3)
    shrink_unlikely(model.lm_head.weight, LIKELY)
    return model


@pytest.fixture(scope="module")
def target_folder(target: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(target, tmp_path_factory.mktemp("target"))


class OtherModel:
    """Reference of a smaller model: its greedy continuation, within its positions."""

    def __init__(self, model: torch.nn.Module, num_positions: int = 256) -> None:
        self.model, self.num_positions = model, num_positions

    @torch.no_grad()
    def drafts(self, tokens: list[int], params: dict) -> list[int]:
        ids = list(tokens)
        for _ in range(min(MOST, self.num_positions - len(tokens))):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(tokens) :]


Made = tuple[Path, OtherModel | Reference]


def make_other(target: torch.nn.Module, folder: Path) -> Made:
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "hidden_size": 32}
    model = make_model("Llama", LLAMA | changes, seed=1)
    shrink_unlikely(model.lm_head.weight, LIKELY)
    return save(model, folder), OtherModel(model)


def make_eagle(target: torch.nn.Module, folder: Path) -> Made:
    tensors = eagle_tensors(2, bias=True)
    reference = Reference(target, tensors, ["layers.0", "layers.1"])
    return write(folder, tensors, num_hidden_layers=2), reference


def make_eagle3(target: torch.nn.Module, folder: Path) -> Made:
    tensors = eagle3_tensors("midlayer")
    tokens = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
    shrink_unlikely(tensors["lm_head.weight"], [tokens.index(one) for one in LIKELY])
    reference = Reference(target, tensors, ["midlayer"], (2, 3, 3))
    return write(folder, tensors, draft_vocab_size=len(tokens)), reference


MAKE = {"draft_model": make_other, "eagle": make_eagle, "eagle3": make_eagle3}


def require_drafts(log: StepLog, reference: OtherModel | Reference) -> int:
    """Compare the greedy drafts of all steps. Return how many were compared."""
    return require_reference_drafts(log, reference, {"repetition_penalty": 1.0}, MOST)


@pytest.mark.parametrize("fixture", ["gpu_runner", "rerun_graphs"])
@pytest.mark.parametrize("method", MAKE)
def test_drafts_are_those_of_a_reference(
    request, on_gpu, tmp_path, target, target_folder, method: str, fixture: str
):
    """Prompts in chunks, next to tokens of others; the second time, prefixes are in the cache.

    Steps overlap in padded graphs."""
    request.getfixturevalue(fixture)
    drafter, reference = MAKE[method](target, tmp_path / "drafter")
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 64}
    given["async_scheduling"] = fixture == "rerun_graphs"
    llm = on_gpu(target_folder, drafter, method, MOST, **given)
    prompts = [one[:length] for one, length in zip(random_prompts(5, 140), LENGTHS, strict=True)]
    params = GREEDY | {"max_tokens": 16}
    (expected,) = plain_answers(target_folder, prompts, params)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == expected
        assert answers(llm, prompts[3:], **params) == expected[3:]
    assert require_drafts(log, reference) > 50
    assert 10 < log.num_accepted < 0.9 * log.num_drafts
    steps = [step for step, _ in log.steps]
    assert max(new.num_computed_tokens for step in steps for new in step.new_rows) >= 64
    assert any(step.num_drafts.any() and not step.samples.all() for step in steps)
    num_graphs = len(llm._core.executor._worker.runner._graphs)
    assert (num_graphs > 0) == (fixture == "rerun_graphs")
    llm.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 20, "swap_space": 0.001},
        {"num_gpu_blocks_override": 20},
        {"block_size": 2},
    ],
    ids=["swap", "recomputation", "small blocks"],
)
def test_drafts_of_the_model_itself_are_right(on_gpu, target_folder, settings: dict):
    """Greedy requests and those with seeds, after preemptions, too. Steps overlap."""
    given = {"max_model_len": 120, "async_scheduling": True, **settings}
    prompts = random_prompts(5, 40)
    llm = on_gpu(target_folder, target_folder, **given)
    expected = plain_answers(target_folder, prompts, GREEDY, SAMPLED, **given)
    with logged_steps(llm) as log:
        assert [answers(llm, prompts, **one) for one in (GREEDY, SAMPLED)] == expected
    assert log.num_drafts > 150
    assert log.acceptance_rate == 1.0
    num_placed = sum(len(step.new_rows) for step, _ in log.steps)
    assert (num_placed > 2 * len(prompts)) == ("num_gpu_blocks_override" in settings)
    assert any(step.swap_in for step, _ in log.steps) == ("swap_space" in settings)
    llm.shutdown()


@pytest.mark.parametrize("method", MAKE)
def test_drafts_end_with_the_context(on_gpu, tmp_path, target, target_folder, method):
    drafter, _ = MAKE[method](target, tmp_path / "drafter")
    given = {"max_model_len": 48, "async_scheduling": True}
    llm = on_gpu(target_folder, drafter, method, MOST, **given)
    prompts = [
        one[:length] for length, one in zip((47, 46, 44, 30), random_prompts(4, 47), strict=True)
    ]
    params = GREEDY | {"max_tokens": None}
    (expected,) = plain_answers(target_folder, prompts, params, **given)
    assert [len(one.token_ids) for one in expected] == [1, 2, 4, 18]
    assert answers(llm, prompts, **params) == expected
    llm.shutdown()


def test_drafts_stop_where_the_drafters_positions_end(on_gpu, target_folder, tmp_path):
    model = make_model("GPT2", {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 48}, 2)
    shrink_unlikely(model.lm_head.weight, LIKELY)
    reference, prompts = OtherModel(model, 48), random_prompts(3, 30)
    llm = on_gpu(target_folder, save(model, tmp_path), async_scheduling=False)
    params = GREEDY | {"max_tokens": 40}
    (expected,) = plain_answers(target_folder, prompts, params)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == expected
    assert require_drafts(log, reference) > 60
    assert log.num_accepted > 10
    llm.shutdown()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("runner", ["GPU", "CPU"])
def test_steps_draft_only_for_steps_that_verify(
    request, monkeypatch, target_folder, runner: str, is_async: bool
):
    """When drafts pay again, they are right: the drafter has computed the tokens meanwhile."""
    if runner == "GPU":
        request.getfixturevalue("gpu_runner")
    rng = random.Random(0)

    def useful(self: StepCosts, num_drafts, *others):
        return num_drafts * (rng.random() < 0.6)

    monkeypatch.setattr(StepCosts, "useful", useful)
    llm = drafting_engine(target_folder, target_folder, async_scheduling=is_async, **SETTINGS)
    with logged_steps(llm) as log:
        answers(llm, random_prompts(2), **GREEDY | {"max_tokens": 100})
    asked = [step.drafts for step, _ in log.steps]
    assert asked.count(False) > 10
    assert asked.count(True) > 10
    assert log.num_drafts > 40
    assert log.acceptance_rate == 1.0
    for step, output in log.steps:
        assert (output.drafts >= 0).any() == step.drafts
    llm.shutdown()


def test_a_drafter_that_may_wait_for_the_gpu_is_not_captured(
    on_gpu, rerun_graphs, monkeypatch, target_folder, tmp_path
):
    """Transformers computes it. The steps of the model are graphs."""
    model = make_model("Cwm", LLAMA | {"num_hidden_layers": 1}, 2)
    shrink_unlikely(model.lm_head.weight, LIKELY)

    def refuse(*_: object) -> None:
        raise AssertionError("the drafter was captured")

    monkeypatch.setattr("toolkit.worker.gpu.cuda_drafter.capture", refuse)
    llm = on_gpu(target_folder, save(model, tmp_path))
    assert llm._core.executor._worker.runner._graphs
    prompts = random_prompts(3, 30)
    (expected,) = plain_answers(target_folder, prompts, GREEDY)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == expected
    assert require_drafts(log, OtherModel(model)) > 10
    assert log.num_accepted > 5
    llm.shutdown()


def test_steps_without_room_for_drafts_are_refused(on_gpu, target_folder):
    with pytest.raises(ConfigError, match="has no room for drafts next to a token of each of 4 re"):
        on_gpu(target_folder, target_folder, max_num_batched_tokens=4)


def gpu_engine(target: Path, drafter: Path | None, method: str, **settings: object) -> LLM:
    given = {"device": "auto", "kv_cache_memory": None, "num_threads": None, "max_num_seqs": 16}
    return drafting_engine(target, drafter, method, MOST, **given | settings)


def gpu_answers(llm: LLM, count: int = 16) -> list[list[list[int]]]:
    """Return the tokens of prompts of many lengths, greedy and sampled."""
    prompts = [one[: 9 + 4 * n] for n, one in enumerate(random_prompts(count, 100))]
    return [[one.token_ids for one in answers(llm, prompts, **p)] for p in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def plain_gpu_answers(target_folder: Path) -> list[list[list[int]]]:
    llm = gpu_engine(target_folder, None, "draft_model", num_gpu_blocks_override=256)
    found = gpu_answers(llm)
    llm.shutdown()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", MAKE)
def test_drafts_on_a_gpu(
    tmp_path, target, target_folder, plain_gpu_answers, method: str, enforce_eager: bool
):
    """In fp32, sums differ too little to change a token. Prompts come in chunks."""
    drafter, reference = MAKE[method](target, tmp_path / "drafter")
    given = {"max_num_batched_tokens": 64, "enforce_eager": enforce_eager}
    llm = gpu_engine(target_folder, drafter, method, num_gpu_blocks_override=256, **given)
    drafter_graphs = llm._core.executor._worker.runner.draft_runner._observing
    assert bool(drafter_graphs) == (not enforce_eager)
    prompts = random_prompts(8, 60)
    with logged_steps(llm) as log:
        answers(llm, prompts, **GREEDY)
    assert require_drafts(log, reference) > 50
    assert 0 < log.num_accepted < log.num_drafts
    for _ in range(2):  # the second time, prefixes are in the cache
        assert gpu_answers(llm) == plain_gpu_answers
    llm.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_drafts_of_the_model_itself_on_a_gpu(target_folder, plain_gpu_answers, enforce_eager: bool):
    """Preempted, too: 40 blocks hold a third of the tokens."""
    given = {"num_gpu_blocks_override": 40, "max_model_len": 160, "enforce_eager": enforce_eager}
    llm = gpu_engine(target_folder, target_folder, "draft_model", **given)
    with logged_steps(llm) as log:
        assert gpu_answers(llm) == plain_gpu_answers
    llm.shutdown()
    assert sum(len(step.new_rows) for step, _ in log.steps) > 2 * 16
    assert log.num_drafts > 500
    assert log.acceptance_rate > 0.99


@pytest.mark.gpu
@pytest.mark.alone
def test_a_drafters_memory_is_measured(target_folder, plain_gpu_answers):
    """The size of the cache is that next to a drafter and its graphs."""
    llm = gpu_engine(target_folder, target_folder, "draft_model", gpu_memory_utilization=0.3)
    with logged_steps(llm) as log:
        assert gpu_answers(llm) == plain_gpu_answers
    info = llm._core.info
    used = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
    llm.shutdown()
    assert info.num_blocks > 1000
    assert used < 0.31
    assert log.acceptance_rate > 0.99
