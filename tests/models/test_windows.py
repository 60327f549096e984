"""Decoders whose windows free memory: every length around blocks and windows, and small pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints, engines
from tests.models import random_states
from tests.models.random_states import DRAFTS, SETTINGS
from tests.references import Reference
from toolkit import LLM, SamplingParams
from toolkit.models.memory import MemoryLayout

pytestmark = pytest.mark.usefixtures("forked_processes")
LENGTHS = [*range(1, 23), 40]
"""All remainders of blocks, and prompts within each window, at its edge and past it."""
COUNT = 14  # tokens of an answer: each passes the edges of blocks, and a window from short prompts
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
FEW = [6, 11, 17, 40]
SMALL = {"num_gpu_blocks_override": 0, "max_model_len": 60}
"""`engines.scarce` finds the number."""
CASES: list[tuple[str, list[int], dict[str, Any]]] = [
    ("gemma3", LENGTHS, {}),
    ("gpt-oss", LENGTHS, {"max_num_batched_tokens": 5, "async_scheduling": True}),
    ("mistral-window", LENGTHS, {"max_num_batched_tokens": 13, "max_num_seqs": 3}),
    ("gemma3", FEW, DRAFTS | {"async_scheduling": True}),
    ("mistral-window", FEW, DRAFTS | {"max_num_batched_tokens": 9}),
    ("gemma2", FEW, DRAFTS | {**SMALL, "swap_space": 0.0}),
    ("exaone4", FEW, {**SMALL, "swap_space": 0.001, "async_scheduling": True}),
    ("cohere2", FEW, {"tensor_parallel_size": 2, **SMALL, "swap_space": 0.0}),
    ("olmo3", FEW, {"pipeline_parallel_size": 2, "max_num_batched_tokens": 8}),
    ("ministral", FEW, {"attention_backend": "torch", "enable_prefix_caching": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "lengths", "mode"), CASES, ids=str)
def test_answers_equal_transformers(checkpoint, name, lengths, mode):
    """Cold, warm, and again after others have used the pages. Some of the drafts are wrong."""
    model, folder = checkpoints.make_reference(name), checkpoint(name)
    assert isinstance(model, Reference)
    prompts = model.prompts(lengths, COUNT, checkpoints.VOCAB)
    expected = [checkpoints.greedy(model, one, COUNT) for one in prompts]
    requests = [(prompt, GREEDY) for prompt in prompts]
    settings = engines.scarce(folder, {"block_size": 4} | mode)
    with random_states.predictions_are_ids():
        if "speculative_config" in mode:
            requests = random_states.with_predictions(requests, expected)
        llm = LLM(str(folder), **SETTINGS | {"max_num_seqs": 6} | settings)
        assert any(one.frees for one in engines.runner(llm).caches[0].layout.groups)
        num_preempted = engines.count_stats(llm, "num_preemptions")
        for order in (slice(None), slice(0, 1), slice(None, None, -1)):
            assert random_states.answers(llm, requests[order]) == expected[order]
        assert (num_preempted() > 0) == ("num_gpu_blocks_override" in mode)
        llm.shutdown()


def test_a_prompt_that_is_found_again_has_windows_of_its_own(checkpoint: Callable[[str], Path]):
    """The second answer's prompt is found up to the grain; the rest is computed again."""
    llm = LLM(str(checkpoint("gemma3")), **SETTINGS, block_size=4, max_num_seqs=2)
    grain = engines.grain(llm)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompt = [(7 * i * i) % 250 for i in range(41)]
    first, again = (
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0] for _ in range(2)
    )
    assert again.num_cached_tokens == 40 // grain * grain > 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    llm.shutdown()


def test_random_requests_equal_those_that_run_without_a_cache(tmp_path):
    """With wrong drafts, prompts that share beginnings, and requests that are swapped."""
    folder = checkpoints.save(random_states.windows(), tmp_path)
    requests = random_states.random_requests(40, seed=5)
    expected = random_states.answers_alone(folder, requests)
    limits = random_states.SWAP | random_states.DRAFTS
    with random_states.predictions_are_ids():
        llm = LLM(str(folder), **SETTINGS, **limits)
        num_preempted = engines.count_stats(llm, "num_preemptions")
        num_hits = engines.count_stats(llm, "prefix_cache_hits")
        guessing = random_states.with_predictions(requests, expected)
        assert random_states.answers(llm, guessing) == expected
        llm.shutdown()
    assert num_preempted() > 0
    assert num_hits() > 0


@pytest.mark.parametrize(
    "more", [{"kv_cache_dtype": "fp8"}, {"quantization": "int8", "enable_prefix_caching": False}]
)
def test_rounded_caches_and_weights_answer_as_in_one_group(checkpoint, monkeypatch, more):
    settings = SETTINGS | {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 3} | more
    requests = [([(7 * i * i + n) % 250 for i in range(n)], GREEDY) for n in (9, 21, 40)]
    found = []
    for frees in (True, False):
        if not frees:
            monkeypatch.setattr(MemoryLayout, "with_groups", lambda layout, *_: layout)
        llm = LLM(str(checkpoint("gemma3")), **settings)
        assert len(engines.runner(llm).caches[0].layout.groups) == 1 + frees
        found.append([random_states.answers(llm, requests) for _ in range(2)])
        llm.shutdown()
    assert found[0] == found[1]
