"""What the routes of pooled prompts share: taking inputs in, running them, and counting their tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import Request

from toolkit.api.http.limits import check_queue
from toolkit.api.http.service import Service
from toolkit.api.http.streaming import while_connected
from toolkit.engine.async_llm import LONG_TEXT
from toolkit.engine.pooled_prompts import (
    Comparison,
    PoolingInput,
    PoolingProcessor,
    Vector,
    num_at_once,
    pooled,
)

T = TypeVar("T")

MAX_INPUTS = 2048
"""Of one request."""


class PooledUsage(msgspec.Struct):
    """The tokens of pooled prompts; nothing is generated."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, inputs: Sequence[PoolingInput]) -> PooledUsage:
        total = sum(len(one.token_ids) for one in inputs)
        return cls(total, total)


class Pooling:
    """One HTTP request's prompts."""

    def __init__(self, service: Service, request: Request, prefix: str, priority: int) -> None:
        self.id = f"{prefix}-{request.state.request_id}"
        self.processor = PoolingProcessor(service.engine.inputs)
        self._engine, self._config = service.engine, service.config
        self._request, self._priority = request, priority

    async def prepare(
        self, given: Sequence[str | list[int]], truncate: int | None
    ) -> list[PoolingInput]:
        """Raises InvalidRequestError for an input that cannot be run."""
        size = sum(map(len, given))
        return await _beside(size, lambda: self.processor.texts(given, truncate))

    async def compare(
        self, firsts: list[str], seconds: list[str], truncate: int | None, names: tuple[str, str]
    ) -> Comparison:
        """Raises InvalidRequestError for texts that cannot be compared."""
        size = sum(map(len, firsts)) + sum(map(len, seconds))
        return await _beside(
            size, lambda: self.processor.comparison(firsts, seconds, truncate, names)
        )

    async def run(self, inputs: Sequence[PoolingInput]) -> list[Vector]:
        """The vectors, in the order of the inputs. Ends when the client goes; raises TooManyRequestsError, EngineError."""
        num_tokens = sum(len(one.token_ids) for one in inputs)
        check_queue(self._engine, self._config, num_at_once(self._engine, inputs), num_tokens)
        # The engine's names end in something that nobody else has: two clients may send one X-Request-Id.
        name = f"{self.id}-{uuid.uuid4().hex[:8]}"
        work = pooled(self._engine, inputs, request_id=name, priority=self._priority)
        return await while_connected(self._request, work)


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Tokenizing many characters is done in a thread, so that other requests do not wait."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()
