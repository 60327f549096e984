"""Start the requests of one HTTP request, and gather their answers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.api.http.limits import check_queue
from toolkit.api.http.service import Service
from toolkit.api.openai.replies import PromptTokensDetails, Usage
from toolkit.engine.input_processor import Prompt
from toolkit.engine.outputs import Delta, PositionLogprobs
from toolkit.engine.stream import RequestStream
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams

MAX_ANSWERS = 4096
"""Of one request, over all its prompts."""
MAX_LOGPROBS_TOLD = 2**20
"""Log-probabilities in the answers of one request, or of its prompts: some 30 to 100 MB of JSON."""
MAX_COPIED = 2**21
"""Tokens and characters of what the prompts of one request share, times their number."""


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
    service: Service,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int,
) -> Group:
    """Takes in all prompts or, when one cannot be run, none. Raises InvalidRequestError.

    The engine's names end in something that nobody else has: two clients may send one X-Request-Id.
    """
    num_answers = len(prompts) * params.n
    if num_answers > MAX_ANSWERS:
        raise InvalidRequestError(
            f"A request has {MAX_ANSWERS} answers at most; {len(prompts)} prompts of {params.n} are more.",
            param="n",
        )
    engine = service.engine
    if params.bad_words:
        params = await asyncio.to_thread(engine.inputs.with_bad_words, params)
    _check_size(len(prompts), params, engine.info.max_model_len)
    name = f"{request_id}-{uuid.uuid4().hex[:8]}"
    taken = []
    num_tokens = 0
    for index, prompt in enumerate(prompts):
        id = name if len(prompts) == 1 else f"{name}-{index}"
        text, request = await engine.prepare(prompt, params, request_id=id, priority=priority)
        num_tokens += len(request.prompt_token_ids)
        if (
            num_answers > 1 and params.prompt_logprobs is not None
        ):  # `echo` tells them in each answer
            _check_told("prompt_logprobs", num_tokens * params.n, params.prompt_logprobs)
        taken.append((request, text))
    check_queue(engine, service.config, num_answers, num_tokens)
    streams: list[RequestStream] = []
    try:
        for request, text in taken:
            streams.append(engine.begin(request, text))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return Group(streams, params.n)


def _check_size(num_prompts: int, params: SamplingParams, max_model_len: int) -> None:
    """Raises InvalidRequestError for a request out of all proportion: what its prompts share is copied for each of them,
    and its answers are put together before they are sent. One answer is bounded by the model's context.
    """
    if num_prompts > 1 and num_prompts * params.size > MAX_COPIED:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {params.size} tokens and characters in allowed_token_ids, stop_token_ids, "
            f"logit_bias, bad_words and stop are more than {MAX_COPIED} in all; send fewer prompts at once.",
            param="prompt",
        )
    if params.logprobs is not None and num_prompts * params.n > 1:
        length = (
            max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
        )
        _check_told("logprobs", num_prompts * params.n * length, params.logprobs)


def _check_told(name: str, num_tokens: int, logprobs: int) -> None:
    if num_tokens * (logprobs + 1) > MAX_LOGPROBS_TOLD:
        raise InvalidRequestError(
            f"{name} of {num_tokens} tokens with {logprobs} others each are more than {MAX_LOGPROBS_TOLD} in one request; "
            "ask for fewer answers or prompts, fewer tokens (max_tokens) or fewer log-probabilities.",
            param=name,
        )


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
