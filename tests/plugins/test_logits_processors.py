"""Logits processors in the engine: which rows they change, and what they combine with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.errors import ConfigError, EngineError, InvalidRequestError, PluginError
from toolkit.scheduler.running import RunningRequests

NAMES = tuple(
    f"tests.inside.plugged:{name}" for name in ("NoRepeat", "Unseen", "Booster", "Failing")
)
PROMPTS = [[random.Random(i).randrange(256) for _ in range(3 + 7 * i)] for i in range(4)]
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
A, B, C = 65, 66, 67


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "overlapped"])
def llm(request, checkpoint: Callable[[str], Path]) -> LLM:
    return make(checkpoint, async_scheduling=request.param)


def make(checkpoint: Callable[[str], Path], **settings: Any) -> LLM:
    usual = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "logits_processors": NAMES}
    return LLM(str(checkpoint("llama3-gqa")), **usual | settings)


def run(llm: LLM, *params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the tokens of each answer. `params`: repeated over the prompts."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    each = [params[i % len(params)] for i in range(len(prompts))]
    results = llm.generate(given, each, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def excluded(prompt: list[int], window: int) -> list[int]:
    """Return Transformers' greedy tokens without the last `window` tokens of the output."""
    model, output = checkpoints.make_reference("llama3-gqa"), []
    for _ in range(16):
        [logits] = model.logits(prompt + output, slice(-1, None))
        logits[output[-window:]] = -torch.inf
        output.append(int(logits.argmax()))
    return output


def test_only_rows_that_ask_are_changed(llm: LLM) -> None:
    plain = SamplingParams(**GREEDY)
    asking = [
        SamplingParams(**GREEDY, extra_args={"no_repeat": 2}),
        SamplingParams(**GREEDY, extra_args={"unseen": True}),
    ]
    found = run(llm, plain, asking[0], asking[1], plain)
    alone = run(llm, plain)
    assert found[0] == alone[0]
    assert found[3] == alone[3]
    assert found[1] == excluded(PROMPTS[1], 2)
    assert found[2] == excluded(PROMPTS[2], 16)
    assert found[1] != alone[1]


def test_state_is_rebuilt_after_a_preemption(checkpoint, monkeypatch) -> None:
    preempted = []
    preempt = RunningRequests.preempt
    monkeypatch.setattr(
        RunningRequests,
        "preempt",
        lambda self, *given, **options: preempted.append(1) or preempt(self, *given, **options),
    )
    params = SamplingParams(**GREEDY, extra_args={"unseen": True, "no_repeat": 1})
    tight = make(checkpoint, block_size=4, num_gpu_blocks_override=14, max_model_len=48)
    assert run(tight, params) == [excluded(prompt, 16) for prompt in PROMPTS]
    assert preempted


def test_seeds_give_the_same_tokens_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(
        seed=5, temperature=1.5, max_tokens=16, ignore_eos=True, extra_args={"no_repeat": 3}
    )
    together = run(llm, params, SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True))
    [alone] = run(llm, params, prompts=PROMPTS[:1])
    assert together[0] == alone
    assert all(token not in alone[max(0, i - 3) : i] for i, token in enumerate(alone))


def test_logprobs_are_those_before_processors(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, logprobs=1, extra_args={"boost": [A]})
    [result] = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
    tokens, logprobs = result.outputs[0].token_ids, result.outputs[0].logprobs
    assert list(tokens) == [A] * 16
    model = checkpoints.make_reference("llama3-gqa")
    expected = checkpoints.logits(model, PROMPTS[1] + [A] * 15).log_softmax(-1)
    expected = expected[len(PROMPTS[1]) - 1 :, A]
    assert [one[A].logprob for one in logprobs] == pytest.approx(expected.tolist(), abs=1e-4)


def test_constraints_and_penalties_follow_processors(llm: LLM) -> None:
    """A processor cannot make a forbidden token possible."""
    letter = llm.tokenizer.encode("c")[0], llm.tokenizer.encode("a")[0]
    grammar = StructuredOutputsParams(regex="[ab]{6}")
    found = run(
        llm,
        SamplingParams(structured_outputs=grammar, max_tokens=9, extra_args={"boost": [*letter]}),
        SamplingParams(**GREEDY, allowed_token_ids=[A, B], extra_args={"boost": [C, B]}),
        SamplingParams(**GREEDY, repetition_penalty=9.0, extra_args={"boost": [A, B], "by": 80.0}),
        SamplingParams(**GREEDY, logit_bias={A: -100.0}, extra_args={"boost": [A], "by": 50.0}),
    )
    assert llm.tokenizer.decode(found[0]) == "aaaaaa"
    assert found[1] == [B] * 16
    assert set(found[2][:2]) == {A, B}
    assert A not in found[3]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"Failing.*KeyError: 'no such rule'"),
        ("shape", r"Failing.*TypeError: apply must return logits of shape \(1, 262\)"),
        ("nothing left", "logits processors that read fail_at, how leave no token"),
    ],
)
def test_a_failing_processor_ends_only_its_requests(llm: LLM, how: str, message: str) -> None:
    failing = SamplingParams(**GREEDY, extra_args={"fail_at": 3, "how": how})
    plain = SamplingParams(**GREEDY)
    expected = run(llm, plain)
    with pytest.raises(EngineError, match=f"1 of 4 requests failed.*{message}"):
        run(llm, plain, failing, plain, plain)
    assert run(llm, plain) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_repeat": "2"}, r"processor NoRepeat: Expected `int`, got `str` - at `no_repeat`"),
        ({"no_repeat": 0}, "no_repeat must be at least 1"),
        ({"by": 1.0}, "processor Booster: Object missing required field `boost`"),
        ({"bost": [1]}, r"has no argument 'bost'. Did you mean boost\?"),
        ({"boost": [1 << 70]}, "cannot be sent to the engine"),
        ({"boost": [1] * 70_000}, "at most 65536 bytes"),
    ],
)
def test_bad_arguments_are_refused_at_request_time(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as found:
        run(llm, SamplingParams(**GREEDY, extra_args=arguments))
    assert found.value.param == "extra_args"


def test_arguments_without_processors_are_refused(checkpoint) -> None:
    llm = make(checkpoint, logits_processors=())
    with pytest.raises(InvalidRequestError, match=r"no logits processors\. --logits-processors"):
        run(llm, SamplingParams(**GREEDY, extra_args={"boost": [1]}))


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("a.b.C", ConfigError, r"takes MODULE:NAME; got 'a\.b\.C'\. Did you mean a\.b:C\?"),
        ("no_such_module:Name", PluginError, "ModuleNotFoundError: No module named"),
        ("tests.inside.plugged:Nothing", PluginError, "AttributeError.*'Nothing'"),
        ("json:loads", PluginError, "has no arguments_type, check, apply"),
        (
            "toolkit.sampling.logits_processors:LogitsProcessor",
            PluginError,
            "has no arguments_type",
        ),
    ],
)
def test_a_flag_that_names_a_broken_one_is_an_error(checkpoint, target, error, message) -> None:
    with pytest.raises(error, match=message):
        make(checkpoint, logits_processors=(target,))
