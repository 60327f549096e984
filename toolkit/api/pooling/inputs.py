"""Shared by the pooling routes: tokenize inputs, run them, count their tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import Request

from toolkit.api.http.layers.limits import check_queue
from toolkit.api.http.server import Target
from toolkit.api.http.streaming import while_connected
from toolkit.engine.async_llm import LONG_TEXT
from toolkit.engine.front.pooled_prompts import (
    Comparison,
    PoolingInput,
    PoolingProcessor,
    Vector,
    num_concurrent,
    pool,
)
from toolkit.errors import InvalidRequestError

T = TypeVar("T")

MAX_INPUTS = 2048  # of one request
TRUNCATE_DESCRIPTION = (
    "Tokens to keep of each text or pair; -1: as many as the model takes. Without it, a longer "
    "one is an error"
)


class PooledUsage(msgspec.Struct):
    """Tokens of the inputs. Nothing is generated."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, inputs: Sequence[PoolingInput]) -> PooledUsage:
        total = sum(len(one.token_ids) for one in inputs)
        return cls(total, total)


class PoolingJob:
    """Prompts of one HTTP request."""

    def __init__(self, target: Target, request: Request, prefix: str, priority: int) -> None:
        if target.adapter is not None:
            raise InvalidRequestError(
                f"{target.adapter.name!r} is an adapter, and adapters do not pool. Use "
                f"{target.model.name!r}.",
                param="model",
            )
        self.id = f"{prefix}-{request.state.request_id}"
        self.processor = PoolingProcessor(target.engine.inputs)
        self._target, self._request, self._priority = target, request, priority

    async def prepare(
        self, given: Sequence[str | list[int]], truncate: int | None
    ) -> list[PoolingInput]:
        """Raises InvalidRequestError for an input that cannot run."""
        size = sum(map(len, given))
        return await _tokenize(size, lambda: self.processor.prepare_texts(given, truncate))

    async def compare(
        self, firsts: list[str], seconds: list[str], truncate: int | None, names: tuple[str, str]
    ) -> Comparison:
        """Raises InvalidRequestError for texts that cannot be compared."""
        size = sum(map(len, firsts)) + sum(map(len, seconds))
        return await _tokenize(
            size, lambda: self.processor.prepare_comparison(firsts, seconds, truncate, names)
        )

    async def run(self, inputs: Sequence[PoolingInput]) -> list[Vector]:
        """Return one vector per input. A disconnect of the client aborts the run.

        In the queue, it counts as the inputs that the engine has at once, with the tokens of all.
        Raises TooManyRequestsError and EngineError."""
        num_tokens = sum(len(one.token_ids) for one in inputs)
        engine = self._target.engine
        check_queue(self._target, num_concurrent(engine, inputs), num_tokens)
        # Engine ids get a random suffix: two clients may send the same X-Request-Id.
        name = f"{self.id}-{uuid.uuid4().hex[:8]}"
        work = pool(engine, inputs, request_id=name, priority=self._priority)
        return await while_connected(self._request, work)


async def _tokenize(size: int, work: Callable[[], T]) -> T:
    """Run `work` on `size` characters, in a thread if that would keep other requests waiting."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()
