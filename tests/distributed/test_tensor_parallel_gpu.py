"""Tensor parallelism on GPUs, over NCCL: equal to one process and to Transformers.

Runs with `make test-gpu`.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from tests import checkpoints
from tests.distributed.test_tensor_parallel import prompts_for
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.distributed import symmetric
from toolkit.errors import WorkersLostError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SMALL = {"num_gpu_blocks_override": 400, "max_num_seqs": 16, "dtype": "float32"}
NEW_TOKENS = 24


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result in a new process: peer memory needs one that was no rank before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def generate(
    folder: str, size: int, settings: dict, prompts: list[list[int]], params: Any
) -> tuple[list, str]:
    """Return (results, log) of an engine over `size` GPUs."""
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("toolkit").addHandler(handler)
    logging.getLogger("toolkit").setLevel("INFO")
    llm = LLM(folder, tensor_parallel_size=size, **SMALL | settings)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm.shutdown()
    return results, "\n".join(log)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),
        ("llama3-gqa", {}),
        ("qwen3", {}),
        ("qwen3", {"enforce_eager": True}),
        ("gpt2", {"async_scheduling": False}),
        ("qwen2-moe", {}),
        ("qwen3-moe", {"enable_expert_parallel": True}),
        ("qwen3", {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}),
        ("qwen3", {"speculative_config": {"method": "draft_model"}}),
    ],
)
def test_greedy_tokens_and_logprobs_equal_transformers(checkpoint, name, settings, size):
    if size > torch.cuda.device_count():
        pytest.skip("needs four GPUs")
    model, prompts = checkpoints.make_reference(name), prompts_for(name)
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0
    )
    more = {"max_num_batched_tokens": 32} | settings
    if (config := settings.get("speculative_config", {})).get("method") == "draft_model":
        more["speculative_config"] = config | {"model": str(checkpoint(name))}
    results, log = in_a_process(generate, str(checkpoint(name)), size, more, prompts, params)
    assert f"all-reduce over {size} GPUs: 8 KiB" in log
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, NEW_TOKENS)
        expected = checkpoints.logits(model, prompt).log_softmax(-1)
        for position, found in enumerate(result.prompt_logprobs[1:]):
            token = prompt[position + 1]
            assert found[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-3)


def test_all_kinds_of_sampling_equal_one_gpu(checkpoint):
    kinds = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True, n=2),
        SamplingParams(
            temperature=0.8, seed=2, top_p=0.8, max_tokens=16, ignore_eos=True, logprobs=2
        ),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, ignore_eos=True),
        SamplingParams(
            seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")
        ),
    ]
    prompts = prompts_for("sampling") + prompts_for("more")[:1]
    found = []
    for size in (1, 2):
        results, _ = in_a_process(generate, str(checkpoint("qwen3")), size, {}, prompts, kinds)
        found.append([[list(answer.token_ids) for answer in result.outputs] for result in results])
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_errors_of_8_and_16_bits_equal_those_of_one_gpu(checkpoint, settings):
    prompt, params = (
        prompts_for("fp8")[2],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
    )
    expected = checkpoints.logits(checkpoints.make_reference("llama3-gqa"), prompt).log_softmax(-1)
    errors = []
    for size in (1, 2):
        common = {"dtype": "bfloat16"} | settings
        [result], _ = in_a_process(
            generate, str(checkpoint("llama3-gqa")), size, common, [prompt], params
        )
        found = torch.tensor(
            [
                logprobs[token].logprob
                for logprobs, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
        )
        errors.append(
            float((found - expected[range(len(prompt) - 1), prompt[1:]]).square().mean().sqrt())
        )
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("uses_nccl", [False, True])
@pytest.mark.parametrize(("num_prompts", "length", "max_tokens"), [(1, 1, 100), (64, 40, 1)])
def test_an_engine_ends_when_a_rank_is_killed(
    checkpoint, num_prompts, length, max_tokens, uses_nccl
):
    """Covers decode steps and prompts, and graphs with NCCL's sums, which NCCL waits for."""
    in_a_process(
        end_after_a_killed_rank, str(checkpoint("gpt2")), num_prompts, length, max_tokens, uses_nccl
    )


def end_after_a_killed_rank(
    folder: str, num_prompts: int, length: int, max_tokens: int, uses_nccl: bool
) -> None:
    symmetric._opened = uses_nccl
    settings = SMALL | {
        "max_num_seqs": 64,
        "num_gpu_blocks_override": 1000,
        "enable_prefix_caching": False,
    }
    llm = LLM(folder, tensor_parallel_size=2, **settings)
    prompts = [{"prompt_token_ids": [1 + i] * length} for i in range(num_prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    rank = next(
        child for child in psutil.Process().children() if "toolkit.executor.rank" in child.cmdline()
    )
    threading.Timer(0.05, rank.kill).start()

    def generate_forever() -> None:
        while True:
            llm.generate(prompts, params, use_tqdm=False)

    try:
        generate_forever()
    except WorkersLostError:  # the traceback keeps the step's objects alive
        ended = threading.Thread(target=llm.shutdown, daemon=True)
        ended.start()
        ended.join(15)
        assert not ended.is_alive()
    else:
        raise AssertionError("the step continued without the rank")


def test_no_process_is_left_after_shutdown(checkpoint):
    before = psutil.Process().children(recursive=True)
    llm = LLM(str(checkpoint("gpt2")), tensor_parallel_size=2, **SMALL)
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert children
    llm.shutdown()
    _, alive = psutil.wait_procs(children, 10)
    assert not alive
