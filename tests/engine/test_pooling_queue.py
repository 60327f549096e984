"""Pooled prompts in the engine at once, and those held back."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from toolkit.engine.front.pooled_prompts import PoolingInput, num_concurrent, pool
from toolkit.errors import EngineError
from toolkit.metrics import Metrics
from toolkit.sampling.params import PoolingParams

METRICS = Metrics("tk", "model")


class Engine:
    """Engine with steps of eight tokens. A prompt's vector holds its length."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(max_num_batched_tokens=8)
        self.num_cores = 1
        self.num_waiting_tokens = 0
        self.held_back: list[int] = []
        """Tokens held back when each prompt was started, without the prompt itself."""
        self.num_open = self.max_open = 0

    def metrics_of(self, stream):
        return METRICS

    def start_request(self, request):
        self.held_back.append(self.num_waiting_tokens - request.spec.num_prompt_tokens)
        return Stream(self, request)


class Stream:
    def __init__(self, engine: Engine, request) -> None:
        self.engine, self.size = engine, request.spec.num_prompt_tokens
        engine.num_open += self.size
        engine.max_open = max(engine.max_open, engine.num_open)

    async def __anext__(self):
        await asyncio.sleep(0)
        self.engine.num_open -= self.size
        embedding = np.array([self.size], np.float32).tobytes() if self.size != 7 else b""
        return SimpleNamespace(embedding=embedding)

    def close(self) -> None:
        pass


def inputs(*sizes: int) -> list[PoolingInput]:
    return [PoolingInput(array("i", [1] * size), PoolingParams()) for size in sizes]


def test_held_back_prompts_count_as_waiting_until_they_start():
    engine, sizes = Engine(), [4, 4, 8, 5, 6, 1]
    vectors = asyncio.run(pool(engine, inputs(*sizes), request_id="x"))
    assert [vector.tolist() for vector in vectors] == [[size] for size in sizes]
    assert engine.held_back == [sum(sizes[i + 1 :]) for i in range(len(sizes))]
    assert engine.max_open == 16
    assert engine.num_waiting_tokens == 0


def test_after_a_failure_nothing_counts_as_waiting():
    engine = Engine()
    with pytest.raises(EngineError):
        asyncio.run(pool(engine, inputs(7, 16, 16), request_id="x"))
    assert engine.num_waiting_tokens == 0


@pytest.mark.parametrize(
    ("sizes", "count"), [([4, 4, 8, 5], 3), ([20, 1], 1), ([16], 1), ([1] * 40, 16)]
)
def test_number_of_concurrent_prompts(sizes: list[int], count: int):
    assert num_concurrent(Engine(), inputs(*sizes)) == count
