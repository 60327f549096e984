"""Drafters with a model on the GPU's runner, in Triton's interpreter: drafts of plain references.

`test_gpu_runner` has the options of requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import engines
from tests.checkpoints import make_model, save
from tests.speculative.drafting import (
    LLAMA,
    StepLog,
    answers,
    drafting_engine,
    logged_steps,
    random_prompts,
    save_llama,
)
from tests.speculative.plain import Llama, Target, shrink_unlikely, shrunk
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
from toolkit.kernels.table import CPUKernels, TritonKernels
from toolkit.scheduler.speculation import StepCosts

LIKELY = [65, 66, 67]
MOST = 3
LENGTHS = (9, 200, 22, 50)
GREEDY = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True}
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
        assert type(engines.kernels(llm)) is TritonKernels
        return llm

    return make


def plain_answers(target: Path, prompts: list[list[int]], *params: dict, **settings) -> list:
    """Complete prompts with the CPU's runner, without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.worker.worker.kernels_for", lambda device: CPUKernels())
        llm = drafting_engine(target, None, **SETTINGS | settings)
        assert type(engines.kernels(llm)) is CPUKernels
        found = [answers(llm, prompts, **one) for one in params]
        llm.shutdown()
    return found


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return shrink_unlikely(save_llama(folder, seed=3, num_hidden_layers=LAYERS), LIKELY)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Llama:
    return Llama(target_folder)


class OtherModel:
    """Reference of a smaller model: its greedy continuation, within its positions."""

    def __init__(self, model: Target, num_positions: int = 256) -> None:
        self.model, self.num_positions = model, num_positions

    @torch.no_grad()
    def drafts(self, tokens: list[int]) -> list[int]:
        ids = list(tokens)
        for _ in range(min(MOST, self.num_positions - len(tokens))):
            ids.append(int(self.model.logits(ids)[-1].argmax()))
        return ids[len(tokens) :]


Made = tuple[Path, OtherModel | Reference]


def make_other(target: Llama, folder: Path) -> Made:
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 4, "hidden_size": 32}
    shrink_unlikely(save_llama(folder, seed=1, **changes), LIKELY)
    return folder, OtherModel(Llama(folder))


def make_eagle(target: Llama, folder: Path) -> Made:
    tensors = eagle_tensors(2, bias=True)
    reference = Reference(target, tensors, ["layers.0", "layers.1"])
    return write(folder, tensors, num_hidden_layers=2), reference


def make_eagle3(target: Llama, folder: Path) -> Made:
    tensors = eagle3_tensors("midlayer")
    tokens = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
    reference = Reference(target, tensors, ["midlayer"], (2, 3, 3))
    return write(folder, tensors, draft_vocab_size=len(tokens)), reference


MAKE = {"draft_model": make_other, "eagle": make_eagle, "eagle3": make_eagle3}


def require_drafts(log: StepLog, reference: OtherModel | Reference) -> int:
    """Compare the greedy drafts of all steps. Return how many were compared."""
    return require_reference_drafts(log, reference, MOST)


@pytest.mark.parametrize(
    ("method", "fixture"),
    [("draft_model", "rerun_graphs"), ("eagle", "gpu_runner"), ("eagle3", "rerun_graphs")],
)
def test_drafts_are_those_of_a_reference(
    request, tmp_path, target, target_folder, method: str, fixture: str
):
    """Prompts in chunks, next to tokens of others; the second time, prefixes are in the cache.

    Steps overlap in padded graphs."""
    on_gpu = request.getfixturevalue("on_gpu")
    request.getfixturevalue(fixture)
    drafter, reference = MAKE[method](target, tmp_path / "drafter")
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 64}
    given["async_scheduling"] = fixture == "rerun_graphs"
    llm = on_gpu(target_folder, drafter, method, MOST, **given)
    prompts = [one[:length] for one, length in zip(random_prompts(4, 200), LENGTHS, strict=True)]
    params = GREEDY | {"max_tokens": 6}
    (expected,) = plain_answers(target_folder, prompts, params)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == expected
        short = GREEDY | {"max_tokens": 3}
        (again,) = answers(llm, prompts[1:2], **short)
    assert again.token_ids == expected[1].token_ids[:3]
    assert require_drafts(log, reference) > 15
    assert 0 < log.num_accepted < 0.9 * log.num_drafts
    steps = [step for step, _ in log.steps]
    assert max(new.num_computed_tokens for step in steps for new in step.new_rows) >= 64
    assert any(step.num_drafts.any() and not step.samples.all() for step in steps)
    assert (len(engines.graphs(llm)) > 0) == (fixture == "rerun_graphs")
    llm.shutdown()


def test_drafts_of_the_model_itself_are_right(on_gpu, target_folder):
    """Greedy requests and those with seeds, after preemptions, too. Steps overlap.

    `test_gpu_constraints` has preemption without swap space."""
    given = {"max_model_len": 60, "async_scheduling": True}
    given |= {"num_gpu_blocks_override": 45, "block_size": 2, "swap_space": 0.001}
    given["max_num_batched_tokens"] = 100  # two prompts
    prompts = random_prompts(3, 40)
    llm = on_gpu(target_folder, target_folder, **given)
    expected = plain_answers(target_folder, prompts, GREEDY, SAMPLED, **given)
    with logged_steps(llm) as log:
        assert [answers(llm, prompts, **one) for one in (GREEDY, SAMPLED)] == expected
    assert log.num_drafts > 15
    assert log.acceptance_rate == 1.0
    assert sum(len(step.new_rows) for step, _ in log.steps) > 2 * len(prompts)
    assert any(step.swap_in for step, _ in log.steps)
    llm.shutdown()


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_end_with_the_context(request, tmp_path, target, target_folder, method):
    on_gpu = request.getfixturevalue("on_gpu")
    drafter, _ = MAKE[method](target, tmp_path / "drafter")
    given = {"max_model_len": 48, "async_scheduling": True}
    llm = on_gpu(target_folder, drafter, method, MOST, **given)
    prompts = [
        one[:length] for length, one in zip((47, 46, 44, 40), random_prompts(4, 47), strict=True)
    ]
    params = GREEDY | {"max_tokens": None}
    (expected,) = plain_answers(target_folder, prompts, params, **given)
    assert [len(one.token_ids) for one in expected] == [1, 2, 4, 8]
    assert answers(llm, prompts, **params) == expected
    llm.shutdown()


def test_drafts_stop_where_the_drafters_positions_end(on_gpu, target_folder, tmp_path):
    changes = {"num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 48}
    shrink_unlikely(save_llama(tmp_path, seed=2, **changes), LIKELY)
    reference, prompts = OtherModel(Llama(tmp_path), 48), random_prompts(2, 38)
    llm = on_gpu(target_folder, tmp_path, async_scheduling=False)
    params = GREEDY | {"max_tokens": 13}
    (expected,) = plain_answers(target_folder, prompts, params)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **params) == expected
    assert require_drafts(log, reference) > 15
    assert log.num_accepted > 1
    llm.shutdown()


@pytest.mark.parametrize(("runner", "is_async"), [("GPU", True), ("CPU", False)])
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
        answers(llm, random_prompts(2), **GREEDY | {"max_tokens": 24})
    asked = [step.drafts for step, _ in log.steps]
    assert asked.count(False) > 2
    assert asked.count(True) > 4
    assert log.num_drafts > 15
    assert log.acceptance_rate == 1.0
    for step, output in log.steps:
        assert (output.drafts >= 0).any() == step.drafts
    llm.shutdown()


class Greedy(Target):
    """A model of Transformers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0]


def test_a_drafter_that_may_wait_for_the_gpu_is_not_captured(
    on_gpu, rerun_graphs, monkeypatch, target_folder, tmp_path
):
    """Transformers computes it. The steps of the model are graphs."""
    model = make_model("Cwm", LLAMA | {"num_hidden_layers": 1}, 2)
    with torch.no_grad():
        model.lm_head.weight.copy_(shrunk(model.lm_head.weight, LIKELY))

    def refuse(*_: object) -> None:
        raise AssertionError("the drafter was captured")

    monkeypatch.setattr("toolkit.worker.drafter.capture", refuse)
    llm = on_gpu(target_folder, save(model, tmp_path))
    assert engines.graphs(llm)
    prompts = random_prompts(2, 30)
    (expected,) = plain_answers(target_folder, prompts, GREEDY)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == expected
    assert require_drafts(log, OtherModel(Greedy(model))) > 10
    assert log.num_accepted > 3
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
    params = [one | {"max_tokens": 24} for one in (GREEDY, SAMPLED)]
    return [[one.token_ids for one in answers(llm, prompts, **given)] for given in params]


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
    drafter_graphs = engines.runner(llm).drafter._observing
    assert bool(drafter_graphs) == (not enforce_eager)
    prompts = random_prompts(8, 60)
    with logged_steps(llm) as log:
        answers(llm, prompts, **GREEDY | {"max_tokens": 24})
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
    info = engines.core(llm).info
    used = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
    llm.shutdown()
    assert info.num_blocks > 1000
    assert used < 0.31
    assert log.acceptance_rate > 0.99
