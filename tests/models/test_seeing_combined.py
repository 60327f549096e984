"""Pictures together with the engine's other features."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import pictured
from tests.models.test_seeing import GREEDY, SETTINGS
from tests.pictured import ASKED, COUNT, InlinePool, answer, prompts
from toolkit import LLM, LoRARequest, SamplingParams
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.front import pictures
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import BeamSearchParams, StructuredOutputsParams

NAME = "qwen2.5-vl"
SEEN = ASKED[0]


@pytest.fixture(autouse=True)
def _pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare pictures in this process."""
    monkeypatch.setattr(pictures, "PicturePool", InlinePool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured.save(NAME, tmp_path_factory.mktemp("combined") / NAME)


def test_log_probabilities(folder):
    llm = LLM(str(folder), **SETTINGS)
    asked = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
    for _ in range(2):  # cold, and warm
        (found,) = llm.generate([SEEN.prompt], asked, use_tqdm=False)
        (given,) = found.outputs
        chosen = [
            one[token].logprob for one, token in zip(given.logprobs, given.token_ids, strict=True)
        ]
        assert chosen == pytest.approx(pictured.logprobs(NAME, SEEN, given.token_ids), abs=1e-4)
    llm.shutdown()


def test_prompt_log_probabilities(folder):
    """Those of the text after the picture, which sees it."""
    llm = LLM(str(folder), **SETTINGS, max_num_batched_tokens=16, max_num_seqs=4)
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (found,) = llm.generate([SEEN.prompt], asked, use_tqdm=False)
    last = SEEN.token_ids[-2:]
    before = SEEN._replace(token_ids=SEEN.token_ids[:-2])
    given = [
        one[token].logprob for one, token in zip(found.prompt_logprobs[-2:], last, strict=True)
    ]
    assert given == pytest.approx(pictured.logprobs(NAME, before, last), abs=1e-4)
    llm.shutdown()


def test_several_answers_share_the_picture(folder):
    llm = LLM(str(folder), **SETTINGS, block_size=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, n=3)
    (found,) = llm.generate([SEEN.prompt], greedy, use_tqdm=False)
    assert [list(one.token_ids) for one in found.outputs] == [answer(NAME, SEEN)] * 3
    seeded = SamplingParams(temperature=1.0, max_tokens=COUNT, ignore_eos=True, n=2, seed=7)
    runs = [llm.generate(prompts(ASKED[:n]), seeded, use_tqdm=False)[0] for n in (1, 4)]
    first, again = ([list(one.token_ids) for one in run.outputs] for run in runs)
    assert first == again
    assert first[0] != first[1]
    llm.shutdown()


def test_adapters_of_the_decoder(folder, tmp_path):
    path = pictured.save_adapter(tmp_path / "adapter")
    llm = LLM(str(folder), **SETTINGS, lora_modules=(f"a={path}",))
    requests = [LoRARequest("a"), None]
    found = llm.generate([SEEN.prompt] * 2, GREEDY, use_tqdm=False, lora_request=requests)
    tokens = [list(one.outputs[0].token_ids) for one in found]
    assert tokens == [answer(NAME, SEEN, is_adapted=True), answer(NAME, SEEN)]
    assert tokens[0] != tokens[1]
    llm.shutdown()


def test_biases_are_applied(folder):
    llm = LLM(str(folder), **SETTINGS)
    first = answer(NAME, SEEN)[0]
    biased = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={first: -100.0}
    )
    (found,) = llm.generate([SEEN.prompt], biased, use_tqdm=False)
    assert first not in found.outputs[0].token_ids
    llm.shutdown()


def test_constrained_answers_are_the_likeliest_allowed(folder):
    llm = LLM(str(folder), **SETTINGS)
    letters = {text: llm.tokenizer.encode(text) for text in "ABCD"}
    chances = {text: pictured.logprobs(NAME, SEEN, ids)[0] for text, ids in letters.items()}
    given = SamplingParams(
        temperature=0.0, max_tokens=1, structured_outputs=StructuredOutputsParams(regex="[A-D]")
    )
    for _ in range(2):  # cold, and warm
        (found,) = llm.generate([SEEN.prompt], given, use_tqdm=False)
        assert found.outputs[0].text == max(chances, key=chances.__getitem__)
    llm.shutdown()


def test_what_would_lose_pictures_is_refused(folder):
    llm = LLM(str(folder), **SETTINGS)
    with pytest.raises(InvalidRequestError, match="Beam search takes text alone"):
        llm.beam_search([SEEN.prompt], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(InvalidRequestError, match="could cut a picture"):
        llm.generate([SEEN.prompt], SamplingParams(truncate_prompt_tokens=5), use_tqdm=False)
    llm.shutdown()


async def test_answers_survive_their_core(folder, forked_processes: None):
    """The next core asks for the pictures again."""
    async with AsyncLLM(str(folder), **SETTINGS) as llm:
        long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

        async def run(wait: Callable[[], None] = lambda: None) -> list[int]:
            tokens: list[int] = []
            async for output in llm.generate(SEEN.prompt, long):
                tokens = list(output.outputs[0].token_ids)
                wait()
            return tokens

        async with asyncio.timeout(60):
            whole = await run()
            assert whole[:COUNT] == answer(NAME, SEEN)
            killed = []

            def kill() -> None:
                if not killed:
                    killed.append(llm.replicas[0].link.pid)
                    psutil.Process(killed[0]).kill()

            assert await run(kill) == whole
            # The last tokens may have been on their way when it was killed.
            while llm.replicas[0].link.pid == killed[0]:
                await asyncio.sleep(0.01)
