"""Prompts that are pooled: how many are in the engine at once, and what of them counts as waiting."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from toolkit.engine.pooled_prompts import PoolingInput, num_at_once, pooled
from toolkit.errors import EngineError
from toolkit.metrics import Metrics
from toolkit.sampling.params import PoolingParams

METRICS = Metrics("tk", "model")


class Engine:
    """Takes steps of eight tokens; a prompt's vector has its length."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(max_num_batched_tokens=8)
        self.num_cores = 1
        self.num_waiting_tokens = 0
        self.held_back: list[int] = []
        """Tokens that were held back when each prompt was begun, itself not counted."""
        self.num_open = self.most_open = 0

    def metrics_of(self, stream):
        return METRICS

    def begin(self, request):
        self.held_back.append(self.num_waiting_tokens - request.spec.num_prompt_tokens)
        return Stream(self, request)


class Stream:
    def __init__(self, engine: Engine, request) -> None:
        self.engine, self.size = engine, request.spec.num_prompt_tokens
        engine.num_open += self.size
        engine.most_open = max(engine.most_open, engine.num_open)

    async def __anext__(self):
        await asyncio.sleep(0)
        self.engine.num_open -= self.size
        embedding = np.array([self.size], np.float32).tobytes() if self.size != 7 else b""
        return SimpleNamespace(embedding=embedding)

    def close(self) -> None:
        pass


def inputs(*sizes: int) -> list[PoolingInput]:
    return [PoolingInput(array("i", [1] * size), PoolingParams()) for size in sizes]


def test_what_is_held_back_counts_as_waiting_until_it_is_begun():
    engine, sizes = Engine(), [4, 4, 8, 5, 6, 1]
    vectors = asyncio.run(pooled(engine, inputs(*sizes), request_id="x"))
    assert [vector.tolist() for vector in vectors] == [[size] for size in sizes]
    assert engine.held_back == [sum(sizes[i + 1 :]) for i in range(len(sizes))]
    assert engine.most_open == 16
    assert engine.num_waiting_tokens == 0


def test_when_one_fails_nothing_counts_as_waiting_any_more():
    engine = Engine()
    with pytest.raises(EngineError):
        asyncio.run(pooled(engine, inputs(7, 16, 16), request_id="x"))
    assert engine.num_waiting_tokens == 0


@pytest.mark.parametrize(
    ("sizes", "count"), [([4, 4, 8, 5], 3), ([20, 1], 1), ([16], 1), ([1] * 40, 16)]
)
def test_so_many_are_begun_before_any_is_done(sizes: list[int], count: int):
    assert num_at_once(Engine(), inputs(*sizes)) == count
