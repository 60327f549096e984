"""Logits and greedy tokens equal Transformers', for every architecture with random weights.

The reference runs each prompt alone. Ours runs it alone, in ragged batches, in chunks, from the
prefix cache, preempted and resumed in both ways, and with several answers at once.
"""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints, engines
from tests.checkpoints import VOCAB, generate
from tests.models.architectures import ARCHITECTURES, REFUSED, WITH_EXPERTS, WITH_STATES
from tests.models.conftest import LENGTHS, SMALL_POOL
from toolkit import LLM
from toolkit.errors import CheckpointError
from toolkit.kernels import cpu

COUNT = 40  # tokens of an answer: more than two blocks, and the smallest pool holds few answers
SHORT = 20  # of answers of all models: past the end of a block
MODES: dict[str, dict] = {
    "reference-attention": {"attention_backend": "torch"},
    "chunks-of-seven": {"max_num_batched_tokens": 7, "block_size": 4},
    "swap": SMALL_POOL | {"swap_space": 0.001, "async_scheduling": True},
}
MODES_OF_FEW: dict[str, dict] = {
    "recompute": SMALL_POOL | {"swap_space": 0.0, "async_scheduling": False},
    "one-token-per-step": {"max_num_batched_tokens": 1, "block_size": 4},
    "overlapped-recompute": SMALL_POOL | {"swap_space": 0.0, "async_scheduling": True},
    "unoverlapped-swap": SMALL_POOL | {"swap_space": 0.001, "async_scheduling": False},
}


@pytest.fixture(scope="module")
def llm(case):
    """An engine with default settings, for tests that do not change it."""
    return case.engine(device="cpu")


def test_logits_equal_transformers(case, llm):
    last = slice(-4, None)
    for prompt in case.prompts[1::2]:
        ours, expected = checkpoints.engine_logits(llm, prompt)[last], case.logits(prompt, last)
        assert ours.shape == expected.shape
        assert (ours - expected).norm() / expected.norm() < 1e-4
        torch.testing.assert_close(
            ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_ragged_batch_then_prefix_cache_hits(case, llm):
    case.assert_greedy(generate(llm, case.prompts, max_tokens=SHORT), num_tokens=SHORT)
    again = generate(llm, case.prompts[3::2], max_tokens=17)  # into the next block
    for result in again:
        grain = engines.grain(llm)
        assert grain == 64 or case.name not in WITH_STATES
        assert result.num_cached_tokens == (len(result.prompt_token_ids) - 1) // grain * grain
    case.assert_greedy(again, num_tokens=17)


@pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")
def test_decode_steps_are_recorded_on_a_cpu(case, llm):
    """A layer that computes with more than kernels is correct but slow."""
    assert checkpoints.records_steps(llm) == (case.name not in WITH_EXPERTS)


def test_few_layers_launch_the_kernels_of_all(case, llm):
    model = engines.model(llm)
    attending = [one for one in model.keepers() if hasattr(one, "shape")]
    kinds = {(one.shape, one.transform.rope is None) for one in attending}
    with model.with_few_layers():
        steps = [step for layer in model._layers() for step in layer]
    few = [mix.attn for step in steps for mix in step.mixes if hasattr(mix, "attn")]
    assert {(one.shape, one.transform.rope is None) for one in few} == kinds
    everything = list(model.layers.modules())
    assert [everything.index(step) for step in steps] == sorted(map(everything.index, steps))


def run(case, settings: dict, prompts: list[list[int]], count: int) -> None:
    """Check the answers, and that requests were preempted, and swapped, as `settings` demand."""
    settings = engines.scarce(case.folder, settings)
    llm = case.engine(device="cpu", **settings)
    scheduler, num_preempted, swaps = (
        engines.scheduler(llm),
        engines.count_stats(llm, "num_preemptions"),
        [],
    )
    schedule = scheduler.schedule
    scheduler.schedule = lambda: (step := schedule(), step and swaps.append(len(step.swap_out)))[0]
    case.assert_greedy(generate(llm, prompts, max_tokens=count), num_tokens=count)
    assert (num_preempted() > 0) == ("num_gpu_blocks_override" in settings)
    assert (sum(swaps) > 0) == (settings.get("swap_space", 0.0) > 0)
    assert scheduler.pool.usage == 0
    assert scheduler.host_pool.num_free == scheduler.host_pool.num_blocks


def test_greedy_tokens_equal_transformers(case):
    """In one of the modes, in turn. Those that share most of their code have different ones."""
    modes = list(MODES.values())
    run(case, modes[list(ARCHITECTURES).index(case.name) % len(modes)], case.prompts[1::2], SHORT)


@pytest.mark.parametrize("mode", MODES_OF_FEW)
def test_greedy_tokens_of_a_few_in_more_modes(few, mode):
    """With more and longer requests than those of all models."""
    run(few, MODES_OF_FEW[mode], few.prompts, COUNT)


@pytest.mark.parametrize("caching", [True, False])
def test_parallel_answers_share_the_prompt(few, caching):
    llm = few.engine(device="cpu", enable_prefix_caching=caching)
    num_hits = engines.count_stats(llm, "prefix_cache_hits")
    results = generate(llm, few.prompts, n=3, max_tokens=COUNT)
    assert [len(result.outputs) for result in results] == [3] * len(few.prompts)
    few.assert_greedy(results, num_tokens=COUNT)
    # The second and the third answer reuse the blocks of the first.
    grain = engines.grain(llm)
    assert num_hits() == sum(2 * ((length - 1) // grain * grain) for length in LENGTHS)


def test_prompt_and_output_logprobs(few):
    """In chunks, so that the positions of a prompt come from several steps."""
    llm = few.engine(device="cpu", max_num_batched_tokens=10)
    for _ in range(2):  # the second time the prompts are cached, but the cache must not be used
        for result in generate(
            llm, few.prompts[1:5:2], logprobs=3, prompt_logprobs=2, max_tokens=20
        ):
            [answer] = result.outputs
            sequence = result.prompt_token_ids + list(answer.token_ids)
            reference = few.logits(sequence).log_softmax(-1)
            assert result.prompt_logprobs[0] is None
            positions = [*result.prompt_logprobs[1:], *answer.logprobs]
            assert len(positions) == len(sequence) - 1
            for index, position in enumerate(positions):
                token = sequence[index + 1]
                assert next(iter(position)) == token
                for id, entry in position.items():
                    assert entry.logprob == pytest.approx(float(reference[index, id]), abs=2e-4)
                rank = int((reference[index] > reference[index, token]).sum()) + 1
                assert position[token].rank == pytest.approx(rank, abs=1)


def test_prompt_logprobs_survive_preemption(few):
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    llm = few.engine(
        device="cpu", num_gpu_blocks_override=41, block_size=4, max_num_batched_tokens=30
    )
    for result in generate(llm, prompts, max_tokens=60, prompt_logprobs=0):
        assert len(result.prompt_logprobs) == 40
        tokens = result.prompt_token_ids[1:]
        found = zip(result.prompt_logprobs[1:], tokens, strict=True)
        ours = [position[token].logprob for position, token in found]
        assert ours == pytest.approx(few.model.logprobs(result.prompt_token_ids), abs=2e-4)


@pytest.mark.parametrize("name", ["glm4-moe", "minimax-m2"])
def test_layers_that_only_draft_are_not_read(tmp_path, name):
    """Layers under the indices after the last one."""
    folder = checkpoints.save(checkpoints.make_reference(name), tmp_path)
    expected = LLM(str(folder), device="cpu").generate([[5, 6]], use_tqdm=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(3, 4)}, file)
    found = LLM(str(folder), device="cpu").generate([[5, 6]], use_tqdm=False)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    save_file(tensors | {"model.layers.1.eh_proj.weight": torch.ones(3, 4)}, file)
    with pytest.raises(CheckpointError, match="eh_proj"):
        LLM(str(folder), device="cpu")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_variants_are_refused_with_the_field(tmp_path, name):
    family, settings, field = REFUSED[name]
    checkpoints.save(checkpoints.make_model(family, settings), tmp_path)
    with pytest.raises(CheckpointError, match=field):
        LLM(str(tmp_path), device="cpu")
