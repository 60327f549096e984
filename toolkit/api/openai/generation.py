"""Start the engine requests of one HTTP request and merge their answers."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit.api.http.layers.limits import check_queue
from toolkit.api.http.server import Target
from toolkit.api.openai.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from toolkit.engine.front.input_processor import Prompt
from toolkit.engine.front.output_processor import RequestState
from toolkit.engine.front.stream import RequestStream
from toolkit.engine.outputs import Delta, LogprobList, PositionLogprobs
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.text.tokenizer import Tokenizer

MAX_ANSWERS = 4096  # of one request, over all its prompts
MAX_TOTAL_LOGPROBS = 2**20
"""Log-probabilities of the answers of one request, or of its prompts: 30 to 100 MB of JSON."""
_LEAST_MS = 0.001  # clients divide by times
MAX_COPIED = 2**21
"""Tokens and characters of the parameters that prompts share, times the number of prompts."""


class AnswerStream(Protocol):
    """Deltas of the answers to one prompt: a RequestStream or a BeamStream."""

    state: RequestState

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class AnswerGroup:
    """Streams of one HTTP request, one per prompt. Choice = prompt index · n + answer index."""

    streams: Sequence[AnswerStream]
    n: int
    hears: bool = False  # prompts have clips, not pictures
    num_tokens: int = 0

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield (choice, delta) of all prompts as they arrive. Raises EngineError."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                self.num_tokens += len(delta.token_ids)
                yield delta.index, delta
            return
        async for prompt, delta in _merge(self.streams):
            self.num_tokens += len(delta.token_ids)
            yield prompt * self.n + delta.index, delta

    def usage(self) -> Usage:
        prompt = sum(len(stream.state.prompt_token_ids) for stream in self.streams)
        cached = sum(stream.state.num_cached_tokens for stream in self.streams)
        total = prompt + self.num_tokens
        details = PromptTokensDetails(cached)
        features = sum(stream.state.num_feature_tokens for stream in self.streams)
        if features and self.hears:
            details.audio_tokens = features
        elif features:
            details.image_tokens = features
        usage = Usage(prompt, self.num_tokens, total, details)
        sequences = [one for stream in self.streams for one in stream.state.sequences]
        accepted = sum(one.num_accepted_drafts for one in sequences)
        rejected = sum(one.num_rejected_drafts for one in sequences)
        if accepted or rejected:
            usage.completion_tokens_details = CompletionTokensDetails(accepted, rejected)
        return usage

    def timings(self, choice: int) -> Timings:
        """Return the times of an answer so far; not for beams.

        The prompt is computed between the start and the first token."""
        prompt, answer = divmod(choice, self.n)
        stream = self.streams[prompt]
        assert isinstance(stream, RequestStream), "an answer that is sampled"
        sequence, now = stream.state.sequences[answer], time.monotonic()
        first, cached = sequence.first_token or now, stream.state.num_cached_tokens
        num_prompt = max(1, len(stream.state.prompt_token_ids) - cached)
        prompt_ms = max(_LEAST_MS, 1e3 * (first - (stream.scheduled or stream.arrival)))
        num_output = sequence.num_tokens
        output_ms = max(_LEAST_MS, 1e3 * ((sequence.last_token or now) - first))
        return Timings(
            cached,
            *(num_prompt, prompt_ms, prompt_ms / num_prompt, 1e3 * num_prompt / prompt_ms),
            *(num_output, output_ms, output_ms / max(1, num_output), 1e3 * num_output / output_ms),
        )

    def close(self) -> None:
        """Abort the requests that still run."""
        for stream in self.streams:
            stream.close()


async def start_group(
    target: Target,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int,
) -> AnswerGroup:
    """Start all prompts or, if one cannot run, none. Raises InvalidRequestError.

    Engine ids get a random suffix: two clients may send the same X-Request-Id."""
    num_answers = len(prompts) * params.n
    if num_answers > MAX_ANSWERS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {params.n} answers each exceed the limit of "
            f"{MAX_ANSWERS} answers in one request.",
            param="n",
        )
    engine = target.engine
    if params.bad_words:
        params = await asyncio.to_thread(engine.inputs.tokenize_bad_words, params)
    _check_size(len(prompts), params, engine.info.max_model_len)
    name = f"{request_id}-{uuid.uuid4().hex[:8]}"
    prepared = []
    num_tokens = 0
    for index, prompt in enumerate(prompts):
        id = name if len(prompts) == 1 else f"{name}-{index}"
        one = await engine.prepare(
            prompt, params, request_id=id, priority=priority, adapter=target.adapter
        )
        num_tokens += one.request.spec.num_prompt_tokens
        if num_answers > 1 and params.prompt_logprobs is not None:
            # With `echo` each answer repeats them.
            check_num_logprobs("prompt_logprobs", num_tokens * params.n, params.prompt_logprobs)
        prepared.append(one)
    check_queue(target, num_answers, num_tokens)
    streams: list[RequestStream] = []
    try:
        streams.extend(
            engine.start_request(one.request, one.text, one.features) for one in prepared
        )
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return AnswerGroup(streams, params.n, target.engine.info.hears)


def _check_size(num_prompts: int, params: SamplingParams, max_model_len: int) -> None:
    """Raises InvalidRequestError for a request that would take too much memory.

    Shared parameters are copied for each prompt, and answers are collected before they are sent.
    A single answer is bounded by the model's context."""
    if num_prompts > 1 and num_prompts * params.size > MAX_COPIED:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {params.size} tokens and characters each in "
            "allowed_token_ids, stop_token_ids, logit_bias, bad_words and stop exceed the limit of "
            f"{MAX_COPIED} in one request. Send fewer prompts at once.",
            param="prompt",
        )
    if params.logprobs is not None and num_prompts * params.n > 1:
        length = (
            max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
        )
        check_num_logprobs("logprobs", num_prompts * params.n * length, params.logprobs)


def check_num_logprobs(name: str, num_tokens: int, logprobs: int) -> None:
    """Raises InvalidRequestError if so many log-probabilities would take too much memory."""
    if num_tokens * (logprobs + 1) > MAX_TOTAL_LOGPROBS:
        raise InvalidRequestError(
            f"{name} for {num_tokens} tokens with {logprobs} alternatives each exceed the limit of "
            f"{MAX_TOTAL_LOGPROBS} in one request. Ask for fewer answers, prompts or "
            "log-probabilities, or a lower max_tokens.",
            param=name,
        )


def prompt_logprobs_json(
    positions: Iterable[PositionLogprobs | None],
) -> list[dict[str, Any] | None]:
    """Return prompt log-probabilities by token id, in vLLM's format."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": lp.logprob, "rank": lp.rank, "decoded_token": lp.decoded_token}
            for token, lp in position.items()
        }
        for position in positions
    ]


def token_logprobs(
    positions: LogprobList[PositionLogprobs],
    tokenizer: Tokenizer,
    top: int,
    name_of: Callable[[int], str] | None = None,
) -> list[TokenLogprob]:
    """Return each chosen token and the `top` likeliest, which may include the chosen one.

    `name_of` names a token, instead of its text."""
    name_of = name_of or tokenizer.token_names.__getitem__
    byte_lists = tokenizer.byte_lists
    found = []
    for record in positions.records():
        (rank, token, logprob), shown = record[:3], record[3 : 3 + 2 * top]
        name, as_bytes = name_of(token), byte_lists[token]
        likeliest = [
            TopLogprob(name_of(other), value, byte_lists[other])
            for other, value in zip(shown[::2], shown[1::2], strict=True)
        ]
        if rank <= top and shown[0] != token:  # among equally likely ones, the chosen is first
            others = zip(shown[::2], likeliest, strict=True)
            chosen = TopLogprob(name, logprob, as_bytes)
            likeliest = [chosen, *(one for other, one in others if other != token)]
            likeliest.sort(key=lambda one: -one.logprob)
            del likeliest[top:]
        found.append(TokenLogprob(name, logprob, as_bytes, likeliest))
    return found


async def _merge(streams: Sequence[AnswerStream]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield (index of the stream, delta) of all streams in the order of arrival."""
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def feed(index: int, stream: AnswerStream) -> None:
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
