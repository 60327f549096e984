"""Logits and greedy tokens equal Transformers', for every architecture with random weights.

The reference runs each prompt alone. Ours runs it alone, in ragged batches, in chunks, from the
prefix cache, preempted and resumed in both ways, and with several answers at once.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import NEW_TOKENS, VOCAB
from toolkit import LLM, SamplingParams


def generate(llm: LLM, prompts: list[list[int]], **params: object) -> list[list[int]]:
    settings = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, **params)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
    return [list(answer.token_ids) for result in results for answer in result.outputs]


def test_logits_equal_transformers(case, monkeypatch):
    _, folder, model, prompts, _ = case
    llm = LLM(str(folder), device="cpu", attention_backend="cpu")
    runner = llm._core.executor._worker.runner
    seen: list[torch.Tensor] = []
    compute = runner.model.logits
    monkeypatch.setattr(
        runner.model, "logits", lambda hidden: seen.append(compute(hidden)) or seen[-1]
    )
    for prompt in prompts:
        seen.clear()
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        expected = checkpoints.logits(model, prompt)
        ours = torch.cat(seen)  # the prompt's positions in order; the last is sampled
        assert ours.shape == expected.shape
        assert (ours - expected).norm() / expected.norm() < 1e-4
        torch.testing.assert_close(
            ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_ragged_batch(case, backend):
    _, folder, _, prompts, expected = case
    assert generate(LLM(str(folder), device="cpu", attention_backend=backend), prompts) == expected


def test_single_prompts_then_prefix_cache_hits(case):
    _, folder, _, prompts, expected = case
    llm = LLM(str(folder), device="cpu")
    assert [generate(llm, [p])[0] for p in prompts] == expected
    again = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    assert [list(r.outputs[0].token_ids) for r in again] == expected
    assert [r.num_cached_tokens for r in again] == [(len(p) - 1) // 16 * 16 for p in prompts]


@pytest.mark.parametrize("budget", [1, 7])
def test_chunked_prefill_with_a_tiny_budget(case, budget):
    name, folder, _, prompts, expected = case
    if budget == 1 and name not in ("gpt2", "mistral-window", "qwen3"):
        pytest.skip("one token at a time is slow; three models are enough")
    llm = LLM(str(folder), device="cpu", max_num_batched_tokens=budget, block_size=4)
    assert generate(llm, prompts) == expected


@pytest.mark.parametrize(
    ("swap_space", "overlap"), [(0.0, False), (0.001, False), (0.0, True), (0.001, True)]
)
def test_preemption(case, swap_space, overlap):
    """A pool for little more than one full-length request: recompute or swap, overlapped or not."""
    _, folder, _, prompts, expected = case
    llm = LLM(
        str(folder),
        device="cpu",
        num_gpu_blocks_override=44,
        block_size=4,
        swap_space=swap_space,
        async_scheduling=overlap,
        enable_prefix_caching=False,
    )
    preempted: list[int] = []
    scheduler = llm._core.scheduler
    take = scheduler.take_stats
    scheduler.take_stats = lambda: (stats := take(), preempted.append(stats.num_preemptions))[0]
    swaps: list[int] = []
    close = scheduler._close
    scheduler._close = lambda step: (swaps.append(len(step.swap_out)), close(step))[1]
    assert generate(llm, prompts) == expected
    assert sum(preempted) > 0
    assert (sum(swaps) > 0) == (swap_space > 0)
    assert scheduler.pool.num_free == 44
    assert scheduler.host_pool.num_free == scheduler.host_pool.num_blocks


@pytest.mark.parametrize("caching", [True, False])
def test_parallel_answers_share_the_prompt(case, caching):
    _, folder, _, prompts, expected = case
    llm = LLM(str(folder), device="cpu", enable_prefix_caching=caching)
    hits: list[int] = []
    take = llm._core.scheduler.take_stats
    llm._core.scheduler.take_stats = lambda: (
        stats := take(),
        hits.append(stats.prefix_cache_hits),
    )[0]
    results = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3),
        use_tqdm=False,
    )
    for result, tokens in zip(results, expected, strict=True):
        assert [list(answer.token_ids) for answer in result.outputs] == [tokens] * 3
    # The second and the third answer reuse the blocks of the first.
    assert sum(hits) == sum(2 * ((len(p) - 1) // 16 * 16) for p in prompts)


def test_prompt_and_output_logprobs(case):
    """In chunks, so that the positions of a prompt come from several steps."""
    _, folder, model, prompts, expected = case
    llm = LLM(str(folder), device="cpu", max_num_batched_tokens=10)
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    for _ in range(2):  # the second time the prompts are cached, but the cache must not be used
        for result, tokens in zip(
            llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False),
            expected,
            strict=True,
        ):
            sequence = result.prompt_token_ids + tokens
            reference = checkpoints.logits(model, sequence).log_softmax(-1)
            assert result.prompt_logprobs[0] is None
            positions = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
            assert len(positions) == len(sequence) - 1
            for index, position in enumerate(positions):
                token = sequence[index + 1]
                assert next(iter(position)) == token
                for id, entry in position.items():
                    assert entry.logprob == pytest.approx(float(reference[index, id]), abs=2e-4)
                rank = int((reference[index] > reference[index, token]).sum()) + 1
                assert position[token].rank == pytest.approx(rank, abs=1)
            assert list(result.outputs[0].token_ids) == tokens


def test_prompt_logprobs_survive_preemption(case):
    name, folder, model, _, _ = case
    if name not in ("gpt2", "llama3-gqa"):
        pytest.skip("independent of the model; two are enough")
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    llm = LLM(
        str(folder),
        device="cpu",
        num_gpu_blocks_override=41,
        block_size=4,
        max_num_batched_tokens=30,
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    for result in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
        reference = checkpoints.logits(model, result.prompt_token_ids).log_softmax(-1)
        assert len(result.prompt_logprobs) == 40
        for index in range(1, 40):
            token = result.prompt_token_ids[index]
            got = result.prompt_logprobs[index][token].logprob
            assert got == pytest.approx(float(reference[index - 1, token]), abs=2e-4)
