"""What the routes share: the engine, the model's name, starting requests and counting their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from toolkit.api.fields import Body, check_fields
from toolkit.api.schemas import PromptTokensDetails, Usage
from toolkit.config import ServerConfig
from toolkit.engine.async_llm import AsyncLLM, RequestStream
from toolkit.engine.input_processor import Prompt
from toolkit.engine.outputs import Delta, PositionLogprobs
from toolkit.errors import InvalidRequestError, ModelNotFoundError
from toolkit.sampling.params import SamplingParams

MAX_ANSWERS = 4096
"""Of one request, over all its prompts."""


@dataclass(slots=True)
class Service:
    """One served model."""

    engine: AsyncLLM
    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    expose: Callable[[], Awaitable[bytes]] | None = None
    """Gathers the metrics of all of the server's processes, when there are several."""
    config: ServerConfig = field(default_factory=ServerConfig)

    async def metrics(self) -> bytes:
        """The whole server's metrics in Prometheus' text format."""
        return self.engine.metrics.expose() if self.expose is None else await self.expose()

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError when a request asks for another model than the served one; none is the
        served one.
        """
        known = {self.model_name, self.engine.config.model.model or self.model_name}
        if name and name not in known and Path(name).name != self.model_name:
            raise ModelNotFoundError(
                f"The model {name!r} is not served here; {self.model_name!r} is.",
                param="model",
                code="model_not_found",
            )


def service_for(request: Request, body: Body) -> Service:
    """The service that a request is for. Raises ModelNotFoundError when it asks for another model, and, when the
    server is strict, InvalidRequestError for a field that it does not know.
    """
    service: Service = request.app.state.service
    check_fields(request, body, strict=service.config.strict)
    service.check_model(getattr(body, "model", None))
    return service


@dataclass(slots=True)
class Group:
    """The streams of one HTTP request: one for each of its prompts. Choice = prompt index · n + answer index."""

    streams: Sequence[RequestStream]
    n: int
    num_tokens: int = 0
    tells_tokens: bool = True
    """Whether the generated tokens are the client's, and counted as such."""

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, what is new of it), as they come from any of the prompts. Raises EngineError."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                self.num_tokens += len(delta.token_ids)
                yield delta.index, delta
            return
        async for which, delta in _merged(self.streams):
            self.num_tokens += len(delta.token_ids)
            yield which * self.n + delta.index, delta

    def usage(self) -> Usage:
        prompt = sum(len(stream.state.prompt_token_ids) for stream in self.streams)
        cached = sum(stream.state.num_cached_tokens for stream in self.streams)
        output = self.num_tokens if self.tells_tokens else 0
        return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))

    def close(self) -> None:
        """Ends what is still running."""
        for stream in self.streams:
            stream.close()


async def start(
    service: Service, prompts: Sequence[Prompt], params: SamplingParams, *, request_id: str, priority: int
) -> Group:
    """Takes in all prompts or, when one cannot be run, none. Raises InvalidRequestError.

    The engine's names end in something that nobody else has: two clients may send one X-Request-Id.
    """
    if len(prompts) * params.n > MAX_ANSWERS:
        raise InvalidRequestError(
            f"A request has {MAX_ANSWERS} answers at most; {len(prompts)} prompts of {params.n} are more.",
            param="n",
        )
    name = f"{request_id}-{uuid.uuid4().hex[:8]}"
    streams: list[RequestStream] = []
    try:
        for index, prompt in enumerate(prompts):
            id = name if len(prompts) == 1 else f"{name}-{index}"
            streams.append(await service.engine.submit(prompt, params, request_id=id, priority=priority))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return Group(streams, params.n)


def prompt_logprobs_json(positions: list[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """Prompt log-probabilities by token id, as vLLM reports them."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": lp.logprob, "rank": lp.rank, "decoded_token": lp.decoded_token}
            for token, lp in position.items()
        }
        for position in positions
    ]


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delta]]:
    """(index of the stream, delta) of all streams, in the order in which they come."""
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def feed(index: int, stream: RequestStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(feed(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
