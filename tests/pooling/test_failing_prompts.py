"""A prompt that makes its step fail does not affect other prompts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests import engines
from tests.pooling.folders import bert, bert_tokenizer, save
from toolkit import LLM
from toolkit.engine.front.output_processor import Delta
from toolkit.engine.front.pooled_prompts import _receive_vector, as_vector
from toolkit.errors import EngineError

POISON = 777
PROMPTS = [[5, 6, 7], [8, POISON, 9], [10], [11] * 20, [12, 13]]


@pytest.fixture
def llm(tmp_path):
    return LLM(str(save(bert(), bert_tokenizer(), tmp_path)), num_threads=1)


def run(llm):
    """Return (vectors, errors) by prompt."""
    core = engines.core(llm)
    for number, one in enumerate(llm._pooling.prepare_texts(PROMPTS, None)):
        request = one.request(str(number))
        request.number = number
        core.add(request)
    vectors, errors = {}, {}
    while core.has_work:
        for output in core.step()[0].outputs:
            if output.error is None:
                vectors[output.number] = as_vector(output.embedding)
            else:
                errors[output.number] = output.error
    return vectors, errors


@pytest.mark.parametrize(
    ("failure", "says"),
    [("raises", "a broken token"), ("nan", "not finite"), ("memory", "out of memory")],
)
def test_failing_prompt_gets_an_error_and_others_are_answered(failure, says, llm, monkeypatch):
    expected = [one.outputs.embedding for one in llm.embed(PROMPTS)]
    model = engines.worker(llm).encoder.model
    words = model.words.forward

    def embed_words(token_ids):
        if POISON not in token_ids:
            return words(token_ids)
        if failure == "raises":
            raise RuntimeError("a broken token")
        if failure == "memory":
            raise torch.OutOfMemoryError("none left")
        found = words(token_ids)
        found[token_ids == POISON] = float("nan")
        return found

    monkeypatch.setattr(model.words, "forward", embed_words)
    vectors, errors = run(llm)
    assert set(errors) == {1}
    assert says in errors[1]
    assert set(vectors) == {0, 2, 3, 4}
    for number, vector in vectors.items():
        assert np.abs(vector - np.array(expected[number])).max() < 1e-5


def test_aborted_prompt_has_no_vector():
    async def ended():
        yield Delta(index=0, text="", token_ids=[], finish_reason="abort")

    with pytest.raises(EngineError, match="ended before"):
        asyncio.run(_receive_vector(ended()))
