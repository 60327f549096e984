"""LLM over several engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests import checkpoints, engines
from tests.checkpoints import VOCAB
from tests.server import hook_environment, until
from toolkit import LLM, SamplingParams
from toolkit.engine.cores import core_client
from toolkit.engine.cores.router import Placement, Router
from toolkit.errors import EngineDeadError, ToolkitError

pytestmark = pytest.mark.usefixtures("forked_processes")

NAME = "llama3-gqa"
SMALL = {"device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 200, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(
        checkpoints.make_reference(NAME), tmp_path_factory.mktemp("several") / NAME
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hook_environment(folder).items():
            patch.setenv(name, value)
        made = LLM(str(folder), data_parallel_size=2, pooling="mean", **SMALL)
    yield made
    made.shutdown()


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the cores that requests go to."""
    found: list[int] = []
    place = Router.place

    def record(*args: object, **options: object) -> Placement:
        placement = place(*args, **options)
        found.append(placement.core)
        return placement

    monkeypatch.setattr(Router, "place", record)
    return found


def prompts(count: int) -> list[dict[str, list[int]]]:
    rng = random.Random(count)
    return [
        {"prompt_token_ids": [rng.randrange(VOCAB) for _ in range(i + 3)]} for i in range(count)
    ]


def test_prompts_are_spread_and_tokens_match_transformers(llm: LLM, placed: list[int]) -> None:
    model, many = checkpoints.make_reference(NAME), prompts(12)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, n=2)
    for result, prompt in zip(llm.generate(many, params, use_tqdm=False), many, strict=True):
        expected = checkpoints.greedy(model, prompt["prompt_token_ids"], 16)
        assert [list(one.token_ids) for one in result.outputs] == [expected] * 2
    assert sorted(placed) == [0] * 6 + [1] * 6
    assert not engines.core(llm).has_work


def test_a_common_prefix_goes_to_one_engine_until_it_is_reset(llm: LLM, placed: list[int]) -> None:
    def num_cached(prefix: int, last: int) -> int:
        prompt = {"prompt_token_ids": [prefix] * 100 + [last]}
        [result] = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        return result.num_cached_tokens

    for prefix in range(3, 7):
        placed.clear()
        assert [num_cached(prefix, last) for last in range(3)] == [0, 96, 96]
        assert len(set(placed)) == 1
    llm.reset_prefix_cache()
    assert num_cached(prefix, 0) == 0


def test_unseeded_answers_differ_and_embeddings_match_one_engine(
    llm: LLM, folder: Path, placed: list[int]
) -> None:
    answers = llm.generate(
        [{"prompt_token_ids": [7]}] * 4, SamplingParams(max_tokens=12), use_tqdm=False
    )
    assert len({tuple(one.outputs[0].token_ids) for one in answers}) == 4
    assert set(placed) == {0, 1}
    texts = [one["prompt_token_ids"] for one in prompts(6)]
    alone = LLM(str(folder), pooling="mean", **SMALL)
    several, one = (
        torch.tensor([x.outputs.embedding for x in made.embed(texts)]) for made in (llm, alone)
    )
    assert torch.allclose(several, one, atol=1e-6)


def test_messages_of_idle_cores_do_not_pile_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_client, "PING_AFTER", 0.1)
    first = engines.cores(llm)[0]
    for _ in range(3):
        last = first.last_message_at
        until(lambda before=last: first.last_message_at > before)
    assert engines.core(llm)._messages.empty()


def test_a_core_that_dies_ends_the_call_with_the_cause(llm: LLM, folder: Path) -> None:
    """Must be the last test: it kills the engine."""
    (folder / "slow").touch()  # so that both requests still run when the cores are killed
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    stream, left = (llm.stream({"prompt_token_ids": [3, 4]}, params) for _ in range(2))
    next(stream)
    next(left)
    for core in engines.cores(llm):
        psutil.Process(core.pid).kill()
    with pytest.raises(EngineDeadError, match=r"Engine [01]: .*SIGKILL"):
        list(stream)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate({"prompt_token_ids": [3]}, use_tqdm=False)
    llm.shutdown()
    left.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate({"prompt_token_ids": [3]}, use_tqdm=False)


def test_a_failed_start_reports_the_cause_and_leaves_no_process(
    checkpoint: Callable[[str], Path],
) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ToolkitError, match="max-model-len"):
        LLM(str(checkpoint(NAME)), data_parallel_size=2, max_model_len=10**6, **SMALL)
    assert set(psutil.Process().children(recursive=True)) <= set(before)
