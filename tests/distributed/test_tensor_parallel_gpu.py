"""One model over several GPUs gives what one process gives, and Transformers: over NCCL, `make test-gpu`."""

from __future__ import annotations

import psutil
import pytest
import torch

from tests import checkpoints
from tests.distributed.test_tensor_parallel import prompts_for
from toolkit import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SMALL = {"num_gpu_blocks_override": 400, "max_num_seqs": 16, "dtype": "float32"}
NEW_TOKENS = 24


@pytest.fixture
def shared_out(checkpoint):
    """Loads a model over ranks, which are ended with the test."""
    loaded = []

    def load(name: str, size: int, **settings: object) -> LLM:
        loaded.append(LLM(str(checkpoint(name)), tensor_parallel_size=size, **SMALL | settings))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.shutdown()


def sizes() -> list[int]:
    return [size for size in (2, 4) if size <= torch.cuda.device_count()]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"async_scheduling": False}])
@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "qwen3"])
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(shared_out, name, settings):
    model, prompts = checkpoints.make_reference(name), prompts_for(name)
    for size in sizes():
        llm = shared_out(name, size, max_num_batched_tokens=32, **settings)
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, NEW_TOKENS)
            expected = checkpoints.logits(model, prompt).log_softmax(-1)
            for position, found in enumerate(result.prompt_logprobs[1:]):
                token = prompt[position + 1]
                assert found[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
        llm.shutdown()


def test_sampling_grammars_penalties_and_siblings_agree_with_one_gpu(shared_out):
    kinds = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True, n=2),
        SamplingParams(temperature=0.8, seed=2, top_p=0.8, max_tokens=16, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")),
    ]
    prompts = [{"prompt_token_ids": p} for p in prompts_for("sampling") + prompts_for("more")[:1]]
    found = []
    for size in (1, 2):
        llm = shared_out("qwen3", size)
        results = llm.generate(prompts, kinds, use_tqdm=False)
        found.append([[list(answer.token_ids) for answer in result.outputs] for result in results])
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_fp8_over_two_gpus_is_near_bf16_on_one(shared_out, settings):
    prompt, params = prompts_for("fp8")[2], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for size, more in ((1, {}), (2, settings)):
        llm = shared_out("llama3-gqa", size, **{"dtype": "bfloat16"} | more)
        [result] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found.append([next(iter(p.values())).logprob for p in result.prompt_logprobs[1:]])
        llm.shutdown()
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), atol=0.15)


def test_nothing_is_left_on_the_gpus(shared_out):
    llm = shared_out("gpt2", 2)
    children = psutil.Process().children(recursive=True)
    assert children
    llm.shutdown()
    _, alive = psutil.wait_procs(children, 10)
    assert not alive
