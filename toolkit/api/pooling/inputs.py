"""Shared by the pooling routes: tokenize inputs, run them, count their tokens."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import Field, StrictBool

from toolkit.api.http.body_fields import Prompts, RequestBody, parse_body
from toolkit.api.http.layers.limits import check_queue
from toolkit.api.http.server import Target, target_of
from toolkit.api.http.streaming import while_connected
from toolkit.api.openai.conversation import encode_conversation
from toolkit.api.openai.schemas import ChatRequest, Int
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


class PooledRequest(RequestBody):
    """Texts, token ids, or a conversation."""

    model: str | None = None
    input: Prompts | None = Field(
        None, description=f"A text, token ids, or up to {MAX_INPUTS} of either"
    )
    messages: Any = Field(
        None, description="A conversation instead of an input; takes the options of a chat"
    )
    add_generation_prompt: StrictBool = Field(
        False, description="End a conversation with the beginning of an answer"
    )
    truncate_prompt_tokens: Int | None = Field(None, description=TRUNCATE_DESCRIPTION)
    user: str | None = Field(None, description="Accepted for compatibility; not stored")
    priority: Int = Field(
        0, description="With --scheduling-policy priority, the lowest value runs first"
    )

    def to_chat(self) -> ChatRequest | None:
        """Return the chat whose prompt is wanted, if it is one. Raises InvalidRequestError."""
        if (self.input is None) == (self.messages is None):
            raise InvalidRequestError("The request needs either input or messages.", param="input")
        if self.messages is None:
            return None
        own_fields = set(type(self).model_fields) - {"model", "messages", "add_generation_prompt"}
        chat = parse_body(ChatRequest, self.model_dump(exclude=own_fields))
        if picture := next(iter(chat.to_conversation(None).pictures), None):
            raise InvalidRequestError("Pictures are not pooled. Send text.", param=picture.param)
        return chat

    def inputs(self) -> list[str | list[int]]:
        """Raises InvalidRequestError for no input and for too many."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise InvalidRequestError("input is empty.", param="input")
        if isinstance(self.input[0], int):
            return [self.input]
        if len(self.input) > MAX_INPUTS:
            raise InvalidRequestError(
                f"A request takes at most {MAX_INPUTS} inputs, not {len(self.input)}.",
                param="input",
            )
        return list(self.input)


class PoolingJob:
    """Prompts of one HTTP request."""

    @classmethod
    def of(cls, body: PooledRequest, request: Request, prefix: str) -> PoolingJob:
        """Raises InvalidRequestError for a conversation that is not valid."""
        chat = body.to_chat()
        target = target_of(request, body if chat is None else chat)
        job = cls(target, request, prefix, body.priority)
        job._chat = chat
        return job

    def __init__(self, target: Target, request: Request, prefix: str, priority: int) -> None:
        if target.adapter is not None:
            raise InvalidRequestError(
                f"{target.adapter.name!r} is an adapter, and adapters do not pool. Use "
                f"{target.model.name!r}.",
                param="model",
            )
        self.id = f"{prefix}-{request.state.request_id}"
        self.processor = PoolingProcessor(target.engine.inputs)
        self.target, self._request, self._priority = target, request, priority
        self._chat: ChatRequest | None = None

    async def prepare_inputs(self, body: PooledRequest) -> list[PoolingInput]:
        """Raises InvalidRequestError for an input that cannot run."""
        if self._chat is None:
            return await self.prepare(body.inputs(), body.truncate_prompt_tokens)
        conversation = self._chat.to_conversation(None)
        token_ids = await encode_conversation(self.target, conversation, self._request)
        return await self.prepare([token_ids], body.truncate_prompt_tokens, "messages")

    async def prepare(
        self, given: Sequence[str | list[int]], truncate: int | None, name: str = "input"
    ) -> list[PoolingInput]:
        """Raises InvalidRequestError for an input that cannot run."""
        size = sum(map(len, given))
        return await _tokenize(size, lambda: self.processor.prepare_texts(given, truncate, name))

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
        engine = self.target.engine
        check_queue(self.target, num_concurrent(engine, inputs), num_tokens)
        # Engine ids get a random suffix: two clients may send the same X-Request-Id.
        name = f"{self.id}-{uuid.uuid4().hex[:8]}"
        work = pool(engine, inputs, request_id=name, priority=self._priority)
        return await while_connected(self._request, work)


def encode_base64(vector: Vector) -> str:
    """Return the numbers as little-endian float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def _tokenize(size: int, work: Callable[[], T]) -> T:
    """Run `work` on `size` characters, in a thread if that would keep other requests waiting."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()
