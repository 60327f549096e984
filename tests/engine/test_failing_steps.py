"""Failing steps in a real engine: the faulty request fails, all others get the right tokens."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import engines
from toolkit import LLM, SamplingParams
from toolkit.errors import EngineError, InvalidRequestError

POISON = 200
PROMPTS = [[random.Random(i).randrange(POISON) for _ in range(5 + 9 * i)] for i in range(4)]
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=15, ignore_eos=True, logit_bias={POISON: -100.0}
)


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> list[list[int]]:
    """Tokens of an engine that never failed."""
    llm = LLM(str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=8)
    outputs = llm.generate([*PROMPTS], PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(params=[False, True], ids=["in step", "overlapped"])
def llm(request, checkpoint: Callable[[str], Path]) -> LLM:
    return LLM(
        str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=8, async_scheduling=request.param
    )


def drive(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> dict[int, tuple]:
    """Return (tokens, finish reason, error) of each prompt, also when another one failed."""
    for index, prompt in enumerate(prompts):
        request = llm._inputs.process(prompt, params).request
        request.number = index
        engines.core(llm).add(request)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    ends: dict[int, tuple] = {}
    for _ in range(2000):
        if not engines.core(llm).has_work:
            break
        message = engines.core(llm).step()[0]
        columns = (
            np.frombuffer(message.numbers, np.int64),
            np.frombuffer(message.token_ids, np.int32),
        )
        for number, token in zip(*columns, strict=True):
            tokens[int(number)].append(int(token))
        for output in message.outputs:
            tokens[output.number] += output.token_ids
            if output.finish_reason is not None:
                ends[output.number] = (output.finish_reason, output.error)
    assert not engines.core(llm).has_work
    assert engines.scheduler(llm).pool.usage == 0.0
    return {i: (tokens[i], *ends[i]) for i in range(len(prompts))}


def fail_when(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, reason: Callable[[torch.Tensor], Exception | None]
):
    """Make the model raise the error that `reason` returns for a step's token ids."""
    runner = engines.runner(llm)
    forward = runner.model.forward
    seen: list[torch.Tensor] = []

    def instead(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(token_ids)
        error = reason(token_ids)
        if error is not None:
            raise error
        return forward(token_ids, *rest)

    monkeypatch.setattr(runner.model, "forward", instead)
    return seen


@pytest.mark.parametrize("at", [0, 2, 4])
def test_only_the_faulty_request_fails(llm, expected, monkeypatch, at):
    fail_when(
        llm,
        monkeypatch,
        lambda ids: RuntimeError("a kernel crashed") if (ids == POISON).any() else None,
    )
    prompts = [*PROMPTS]
    prompts.insert(at, [7, POISON, 9])
    results = drive(llm, prompts)
    tokens, reason, error = results.pop(at)
    assert (tokens, reason) == ([], "error")
    assert "RuntimeError: a kernel crashed" in error
    assert [r[0] for r in results.values()] == expected
    assert {r[1:] for r in results.values()} == {("length", None)}


def test_generate_names_the_failed_request_and_works_afterwards(llm, expected, monkeypatch):
    with monkeypatch.context() as patch:
        fail_when(llm, patch, lambda ids: ValueError("spoiled") if (ids == POISON).any() else None)
        with pytest.raises(EngineError, match=r"1 of 5 requests failed.*ValueError: spoiled"):
            llm.generate([*PROMPTS, [POISON]], PARAMS)
        with pytest.raises(EngineError, match="spoiled"):
            list(llm.stream([POISON], PARAMS))
    outputs = llm.generate([*PROMPTS], PARAMS)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
def test_out_of_memory_shrinks_steps_and_keeps_answers_right(llm, expected, monkeypatch, error):
    before = engines.scheduler(llm).max_num_batched_tokens
    errors = iter([None, error])
    seen = fail_when(llm, monkeypatch, lambda ids: next(errors, None))
    results = drive(llm, [*PROMPTS])
    assert [results[i] for i in range(len(PROMPTS))] == [
        (tokens, "length", None) for tokens in expected
    ]
    after = engines.scheduler(llm).max_num_batched_tokens
    assert after < before
    assert all(len(ids) <= after for ids in seen[3:])


def run_with_one_failure(
    llm: LLM, patch: pytest.MonkeyPatch
) -> tuple[list[weakref.ref], weakref.ref]:
    """Return weak references to the activations of each step, and to the model."""
    model = engines.model(llm)
    forward = model.forward
    held: list[weakref.ref] = []

    def instead(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        activations = torch.zeros(100)
        held.append(weakref.ref(activations))
        if len(held) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(token_ids, *rest)

    patch.setattr(model, "forward", instead)
    drive(llm, PROMPTS[:2])
    return held, weakref.ref(model)


def test_memory_of_a_failed_step_is_free_at_once(llm, monkeypatch):
    """Check that shutdown frees the model, too. The garbage collector is off for the test."""
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            held, model = run_with_one_failure(llm, patch)
        assert len(held) > 2
        assert [one() for one in held] == [None] * len(held)
        llm.shutdown()
        assert model() is None
    finally:
        gc.enable()


def test_permanent_out_of_memory_ends_requests_with_advice(llm, monkeypatch):
    fail_when(llm, monkeypatch, lambda ids: torch.OutOfMemoryError("out of memory"))
    results = drive(llm, PROMPTS[:2])
    for tokens, reason, error in results.values():
        assert (tokens, reason) == ([], "error")
        assert "--gpu-memory-utilization" in error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_fail_only_their_request(llm, expected, temperature):
    """A token's embedding is NaN. Its blocks are used again afterwards."""
    model = engines.model(llm)
    with torch.inference_mode():
        model.embed.weight.values[POISON] = torch.nan
    params = SamplingParams(
        temperature=temperature, max_tokens=15, ignore_eos=True, seed=4, logit_bias={POISON: -100.0}
    )
    alone = [drive(llm, [prompt], params)[0] for prompt in PROMPTS]
    for _ in range(2):
        results = drive(llm, [PROMPTS[0], [POISON, 3], *PROMPTS[1:]], params)
        tokens, reason, error = results.pop(1)
        assert (tokens, reason) == ([], "error")
        assert "not finite" in error
        assert list(results.values()) == alone
    if temperature == 0.0:
        assert [tokens for tokens, *_ in alone] == expected


def test_a_persistent_device_error_stops_the_engine(llm, monkeypatch):
    fail_when(llm, monkeypatch, lambda ids: RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        llm.generate("a", PARAMS)


def test_failure_lasts_until_a_step_succeeds(llm, monkeypatch):
    core = engines.core(llm)
    with monkeypatch.context() as patch:
        fail_when(llm, patch, lambda ids: RuntimeError("a kernel crashed"))
        drive(llm, [[7, 9]])
        assert core.failure == "RuntimeError: a kernel crashed"
    drive(llm, [[7, 9]])
    assert core.failure is None
    nothing_left = SamplingParams(max_tokens=3, allowed_token_ids=[5], bad_words_token_ids=[[5, 5]])
    [(tokens, reason, _)] = drive(llm, [[7, 9]], nothing_left).values()
    assert (tokens, reason) == ([5], "error")
    assert core.failure is None
    with torch.inference_mode():
        engines.model(llm).embed.weight.values[POISON] = torch.nan
    drive(llm, [[POISON, 3]])
    assert "not finite" in core.failure


def test_limits_that_forbid_every_token_are_refused(llm):
    every = range(llm.info.vocab_size)
    for limits in (
        {"stop_token_ids": list(every), "min_tokens": 2},
        {"bad_words_token_ids": [[token] for token in every]},
    ):
        with pytest.raises(InvalidRequestError, match="All of the tokens are forbidden"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=5, **limits), use_tqdm=False)


def test_limits_that_forbid_every_later_token_are_named(llm):
    pairs = [[one, two] for one in (5, 6) for two in (5, 6)]
    params = SamplingParams(max_tokens=5, allowed_token_ids=[5, 6], bad_words_token_ids=pairs)
    with pytest.raises(EngineError, match="allowed_token_ids and bad_words leave no token"):
        llm.generate([[1, 2]], params, use_tqdm=False)
