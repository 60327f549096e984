"""Requests that come and go, share prefixes, and are preempted or aborted, with every kind of
sampling, give the same tokens as alone, without overlap, with the reference attention in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkpoints, engines
from tests.checkpoints import VOCAB
from toolkit import LLM, SamplingParams
from toolkit.engine.outputs import CompletionOutput

KINDS: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 7},
    {"temperature": 1.3, "seed": 5, "min_p": 0.05},
    {"temperature": 0.8, "seed": 6, "top_p": 0.8},
    {"temperature": 1.0, "seed": 7, "n": 3},
    {"temperature": 0.6, "seed": 8, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": [17]},
]
SETTINGS: dict[str, dict] = {
    "roomy": {"max_num_seqs": 12},
    "preempting": {"max_num_seqs": 12, "num_gpu_blocks_override": 60, "swap_space": 0.0},
    "swapping": {"max_num_seqs": 12, "num_gpu_blocks_override": 60, "swap_space": 0.01},
    "chunked": {"max_num_seqs": 5, "max_num_batched_tokens": 13},
    "eager": {"max_num_seqs": 12, "enforce_eager": True},
}


Request = tuple[list[int], SamplingParams]
Alone = tuple[Path, list[Request], list[list[CompletionOutput]]]


def random_requests(rng: random.Random, shared: list[int], count: int) -> list[Request]:
    """Return requests of all kinds in turn."""
    return [random_request(rng, shared, KINDS[i % len(KINDS)]) for i in range(count)]


def random_request(rng: random.Random, shared: list[int], kind: dict) -> Request:
    prompt = (shared if rng.random() < 0.4 else []) + [
        rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))
    ]
    return prompt, SamplingParams(max_tokens=rng.randint(5, 24), ignore_eos=True, **kind)


def together(llm: LLM, requests: list, rng: random.Random) -> list[dict[int, list]]:
    """Run requests together. Return each one's (token, log-probabilities or None) by answer.

    They start at different times. Every fifth is aborted after a few tokens.
    """
    waiting, running = list(enumerate(requests)), {}
    found: list[dict[int, list]] = [{} for _ in requests]
    while waiting or running:
        if waiting and (not running or rng.random() < 0.3):
            index, (prompt, params) = waiting.pop()
            running[index] = llm.stream({"prompt_token_ids": prompt}, params)
        index = rng.choice(list(running))
        delta = next(running[index], None)
        if delta is None:
            del running[index]
            continue
        logprobs = delta.logprobs or [None] * len(delta.token_ids)
        found[index].setdefault(delta.index, []).extend(zip(delta.token_ids, logprobs, strict=True))
        if index % 5 == 0 and len(found[index][delta.index]) > 3:
            running.pop(index).close()
    return found


COMMON = {"dtype": "float32", "kv_cache_memory": 0.05, "block_size": 4}


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def alone(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Alone:
    """Return a model, requests, and their answers when each runs alone."""
    rng = random.Random(request.param)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    requests = random_requests(rng, shared, 15)
    folder = checkpoint(request.param)
    llm = LLM(
        str(folder),
        device="cpu",
        attention_backend="torch",
        async_scheduling=False,
        enforce_eager=True,
        enable_prefix_caching=False,
        **COMMON,
    )
    answers = [
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs
        for prompt, params in requests
    ]
    llm.shutdown()
    return folder, requests, answers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_do_not_depend_on_other_requests(alone, setting, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    folder, requests, expected = alone
    llm = LLM(str(folder), async_scheduling=True, device=device, **COMMON, **SETTINGS[setting])
    found = together(llm, requests, random.Random(setting))
    assert engines.scheduler(llm).num_unfinished == 0
    assert engines.scheduler(llm).pool.usage == 0
    for index, answers in enumerate(expected):
        for answer in answers:
            ours = [token for token, _ in found[index].get(answer.index, [])]
            theirs = list(answer.token_ids)
            assert ours == theirs[: len(ours)] if index % 5 == 0 else ours == theirs, (
                index,
                requests[index][1],
            )


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_logprobs_in_16_bits_are_close_to_fp32(tmp_path, monkeypatch, name, setting):
    """The model's sizes use the kernels for head size 128 and those that join norms."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 128,
        "max_position_embeddings": 512,
    }
    monkeypatch.setitem(
        checkpoints.ARCHITECTURES,
        "wide",
        (name, checkpoints.ARCHITECTURES["llama3-gqa"][1] | sizes),
    )
    exact, rounded = checkpoints.make_reference("wide"), checkpoints.make_reference("wide")
    rounded.to("cuda", torch.bfloat16)
    folder = checkpoints.save(exact, tmp_path / "wide")
    rng = random.Random(f"{name} {setting}")
    shared = [rng.randrange(VOCAB) for _ in range(150)]
    requests = random_requests(rng, shared, 25)
    for _, params in requests:
        params.logprobs = 0
    more = SETTINGS[setting] | {"block_size": 16}
    if "num_gpu_blocks_override" in more:
        more["num_gpu_blocks_override"] = 40
    llm = LLM(str(folder), dtype="bfloat16", kv_cache_memory=0.05, async_scheduling=True, **more)
    found = together(llm, requests, rng)
    assert engines.scheduler(llm).pool.usage == 0
    llm.shutdown()
    for (prompt, params), answers in zip(requests, found, strict=True):
        for answer in answers.values():
            tokens = [token for token, _ in answer]
            sequence = prompt + tokens
            at = torch.arange(len(prompt) - 1, len(sequence) - 1)
            wanted = checkpoints.logits(exact, sequence).log_softmax(-1)[at, torch.tensor(tokens)]
            with torch.no_grad():
                theirs = (
                    rounded(torch.tensor([sequence], device="cuda"))
                    .logits[0]
                    .float()
                    .log_softmax(-1)
                    .cpu()
                )
            ours = torch.tensor([place[token].logprob for token, place in answer])
            noise = (theirs - checkpoints.logits(exact, sequence).log_softmax(-1)).abs().max()
            assert (ours - wanted).abs().max() < 2 * noise, params
