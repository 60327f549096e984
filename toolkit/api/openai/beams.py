"""Beam search: each step requests one token of every unfinished beam."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from toolkit.api.http.layers.limits import check_queue
from toolkit.api.http.server import Target
from toolkit.api.openai.generation import AnswerGroup, check_num_logprobs
from toolkit.engine.beam_search import BeamSearch
from toolkit.engine.front.input_processor import Prompt, require_text
from toolkit.engine.front.output_processor import RequestState
from toolkit.engine.front.stream import RequestStream
from toolkit.engine.outputs import Delta, PositionLogprobs
from toolkit.errors import EngineError, InvalidRequestError, RequestTimeoutError
from toolkit.sampling.params import BeamSearchParams, SamplingParams

MAX_BEAMS = 1024  # of one request, over all its prompts


class BeamStream:
    """Answers to one prompt, best first. The search runs while they are read."""

    def __init__(
        self,
        target: Target,
        search: BeamSearch,
        state: RequestState,
        num_answers: int,
        priority: int,
        skip_special_tokens: bool,
    ) -> None:
        self.state = state
        self._target, self._search = target, search
        self._num_answers, self._priority = num_answers, priority
        self._skip_special_tokens = skip_special_tokens
        self._running: list[RequestStream] = []

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises EngineError if a request fails, RequestTimeoutError if the search takes too long.

        The engine's own limit of time applies to each step: a step is a request."""
        timeout = self._target.server.config.request_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._run()
        except TimeoutError:
            raise RequestTimeoutError(f"The request did not finish within {timeout:g} s.") from None
        tokenizer = self._target.engine.tokenizer
        for one in self._search.best(self._num_answers, tokenizer):
            if tokenizer is not None and not self._skip_special_tokens:
                visible = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
                one.text = tokenizer.decode(visible, skip_special_tokens=False)
            yield Delta(
                one.index, one.text, one.token_ids, one.logprobs, finish_reason=one.finish_reason
            )

    def close(self) -> None:
        """End the requests that still run."""
        for stream in self._running:
            stream.close()

    async def _run(self) -> None:
        search, step = self._search, 0
        while not search.is_finished:
            self._running = []
            try:
                for index, beam in enumerate(search.prompts):
                    self._running.append(
                        await self._target.engine.submit(
                            beam,
                            search.step_params,
                            request_id=f"{self.state.id}-{step}-{index}",
                            priority=self._priority,
                            adapter=self._target.adapter,
                        )
                    )
                search.advance([await _first_logprobs(stream) for stream in self._running])
            finally:
                self.close()
            step += 1


@dataclass(frozen=True, slots=True)
class Beams:
    """A beam search that a request asks for."""

    params: BeamSearchParams
    num_answers: int
    truncate_prompt_tokens: int | None


async def start_beams(
    target: Target,
    prompts: Sequence[Prompt],
    beams: Beams,
    *,
    request_id: str,
    priority: int,
    skip_special_tokens: bool = True,
) -> AnswerGroup:
    """Prepare a search for each prompt.

    Raises InvalidRequestError for a prompt or options that cannot run, and TooManyRequestsError."""
    params, engine = beams.params, target.engine
    width, num_answers = params.beam_width, beams.num_answers
    if len(prompts) * width > MAX_BEAMS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {width} beams each exceed the limit of {MAX_BEAMS} beams "
            "in one request.",
            param="best_of",
        )
    prompt_params = SamplingParams(
        max_tokens=params.max_tokens,
        truncate_prompt_tokens=beams.truncate_prompt_tokens,
        stop_token_ids=params.stop_token_ids,
    )
    prepared = [
        await engine.prepare(prompt, prompt_params, adapter=target.adapter) for prompt in prompts
    ]
    if params.logprobs is not None:
        check_num_logprobs("logprobs", len(prompts) * width * params.max_tokens, params.logprobs)
    require_text(prepared)
    num_tokens = sum(one.request.spec.num_prompt_tokens for one in prepared)
    # Each beam is a request of its own.
    check_queue(target, len(prompts) * width, num_tokens * width)
    name = f"{request_id}-{uuid.uuid4().hex[:8]}"
    streams = []
    for index, (text, request, _) in enumerate(prepared):
        token_ids = request.spec.prompt_token_ids
        search = BeamSearch(request.spec, params, engine.config.model.max_logprobs)
        state = RequestState(f"{name}-{index}", text, token_ids, search.step_params)
        streams.append(
            BeamStream(target, search, state, num_answers, priority, skip_special_tokens)
        )
    return AnswerGroup(streams, num_answers)


async def _first_logprobs(stream: RequestStream) -> PositionLogprobs:
    found: list[PositionLogprobs] = []
    async for delta in stream:
        found += delta.logprobs or []
    if not found:
        raise EngineError("The request was aborted before its beams were complete.")
    return found[0]
