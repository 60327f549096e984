"""Drafts of models whose layers keep a state for each request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints, engines
from tests.models import random_states
from tests.speculative.drafting import few_measured_steps, logged_steps
from toolkit import LLM, SamplingParams
from toolkit.attention import StateRows
from toolkit.kernels.table import TritonKernels
from toolkit.worker.batch_state import BatchState

pytestmark = pytest.mark.usefixtures("forked_processes")
SETTINGS = {
    **random_states.SETTINGS,
    "block_size": 16,
    "max_num_seqs": 4,
    "hf_overrides": {"max_position_embeddings": 512},
}
LENGTHS = 1, 3, 62, 63, 64, 65, 130
COUNT = 24
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MODES: dict[str, dict[str, Any]] = {
    "in turn": {},
    "overlapping": {"async_scheduling": True},
    "chunks of 7": {"max_num_batched_tokens": 7, "async_scheduling": True, "max_num_seqs": 2},
    "recomputed": {"num_gpu_blocks_override": 14, "max_model_len": 220},
    "swapped": {"num_gpu_blocks_override": 14, "max_model_len": 220, "swap_space": 0.01},
    "few states": {"state_cache_gib": 0.0, "async_scheduling": True},
    "two ranks": {"tensor_parallel_size": 2, "max_num_seqs": 8},
    "two stages": {"pipeline_parallel_size": 2, "max_num_seqs": 8},
}
Answers = list[list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.models.architectures import ARCHITECTURES

    family, settings = ARCHITECTURES["lfm2"]
    models = {
        "delta nets": random_states.hybrid(),
        "convolutions": checkpoints.make_model(family, settings),
    }
    return {
        name: checkpoints.save(model, tmp_path_factory.mktemp("states"))
        for name, model in models.items()
    }


@pytest.fixture
def predictions() -> Iterator[None]:
    with random_states.predictions_are_ids():
        yield


def ask(llm: LLM, prompts: Answers, expected: Answers | None = None, count: int = COUNT) -> Answers:
    """Return answers. With those that are expected, most drafts are right."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    requests = [(prompt, params) for prompt in prompts]
    if expected is not None:
        requests = random_states.with_predictions(requests, expected)
    return random_states.answers(llm, requests)


def later(prompts: Answers, answers: Answers) -> Answers:
    """Return prompts of next turns."""
    pairs = zip(prompts, answers, strict=True)
    return [[*prompt, *answer, 7, 9] for prompt, answer in pairs if len(prompt) > 20]


@pytest.fixture(scope="module")
def without_drafts(folders: dict[str, Path]) -> dict[str, list[tuple[Answers, Answers]]]:
    """Prompts and answers of two turns."""
    found, chance = {}, random.Random(1)
    for name, folder in folders.items():
        llm = LLM(str(folder), **SETTINGS, enable_prefix_caching=False)
        prompts = [[chance.randrange(250) for _ in range(length)] for length in LENGTHS]
        answers = ask(llm, prompts)
        turns = later(prompts, answers)
        found[name] = [(prompts, answers), (turns, ask(llm, turns))]
        llm.shutdown()
    return found


@pytest.mark.parametrize(
    ("name", "mode"),
    [("delta nets", mode) for mode in MODES if mode not in ("overlapping", "recomputed")]
    + [("convolutions", mode) for mode in ("overlapping", "recomputed", "two stages")],
)
def test_drafts_change_nothing(folders, without_drafts, predictions, all_drafts_pay, name, mode):
    """Cold, and in slots that others have used, from states that decoding has passed."""
    (prompts, expected), (turns, others) = without_drafts[name]
    with few_measured_steps():
        llm = LLM(str(folders[name]), **SETTINGS | MODES[mode], speculative_config=NGRAM)
    assert ask(llm, prompts, expected) == expected
    assert ask(llm, prompts[::-1], expected[::-1]) == expected[::-1]
    assert ask(llm, turns, others) == others
    if mode in ("in turn", "overlapping"):
        with logged_steps(llm) as log:
            given = [{"prompt_token_ids": one} for one in later(turns, others)]
            found = llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
            assert ask(llm, prompts, expected) == expected
        assert log.num_accepted > 30
        assert log.num_accepted < log.num_drafts
        # Up to the last boundary that the answers passed.
        ends = [(len(one["prompt_token_ids"]) - 3) // 64 * 64 for one in given]
        assert [one.num_cached_tokens for one in found] == ends
    llm.shutdown()


def test_drafts_that_are_added_twice_are_found(
    folders, without_drafts, predictions, all_drafts_pay, monkeypatch
):
    """A planted mistake: a state counts as if it lacked the drafts that the step has added."""
    state_rows = BatchState._state_rows

    def forgetful(state: BatchState, starts: torch.Tensor, lens: torch.Tensor) -> StateRows:
        rows = state_rows(state, starts, lens)
        added = lens - (starts[1:] - starts[:-1]) - rows.begins
        state.state_tokens[rows.writes] = rows.written - added
        return rows

    monkeypatch.setattr(BatchState, "_state_rows", forgetful)
    (prompts, expected), _ = without_drafts["delta nets"]
    with few_measured_steps():
        llm = LLM(str(folders["delta nets"]), **SETTINGS, speculative_config=NGRAM)
    assert ask(llm, prompts[:3], expected[:3]) != expected[:3]
    llm.shutdown()


@pytest.mark.parametrize("name", ["delta nets", "convolutions"])
def test_drafts_change_nothing_with_gpu_kernels(
    folders, without_drafts, predictions, rerun_graphs, monkeypatch, name
):
    monkeypatch.setattr("toolkit.models.recurrent.kernels_for", lambda device: TritonKernels())
    (prompts, expected), _ = without_drafts[name]
    limits = {"max_num_batched_tokens": 49, "max_num_seqs": 3, "attention_backend": "torch"}
    with few_measured_steps():
        llm = LLM(str(folders[name]), **SETTINGS | limits, speculative_config=NGRAM)
    with logged_steps(llm) as log:
        found = ask(llm, prompts[1:3], expected[1:3], count=10)
    assert found == [answer[:10] for answer in expected[1:3]]
    assert 3 < log.num_accepted < log.num_drafts
    assert len(engines.graphs(llm)) > 0
    llm.shutdown()
