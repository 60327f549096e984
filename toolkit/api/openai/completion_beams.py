"""Beam search for a completion: each step is a request for one token of every beam that goes on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from toolkit.api.http.limits import check_queue
from toolkit.api.http.service import Service
from toolkit.engine.beam_search import BeamSearch
from toolkit.engine.input_processor import Prompt
from toolkit.engine.outputs import PositionLogprobs
from toolkit.engine.stream import RequestStream
from toolkit.errors import EngineError, InvalidRequestError, RequestTimeoutError
from toolkit.sampling.params import BeamSearchParams, SamplingParams

MAX_BEAMS = 1024
"""Of one request, over all its prompts."""


async def beam_search(
    service: Service,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    *,
    truncate: int | None,
    request_id: str,
    priority: int,
) -> list[BeamSearch]:
    """The finished searches of all prompts. `truncate`: as `truncate_prompt_tokens`. Raises InvalidRequestError when a
    prompt cannot be run, TooManyRequestsError, EngineError when a request fails, RequestTimeoutError when the whole search
    takes too long.
    """
    if len(prompts) * params.beam_width > MAX_BEAMS:
        raise InvalidRequestError(
            f"A request has {MAX_BEAMS} beams at most; {len(prompts)} prompts of {params.beam_width} are more.",
            param="best_of",
        )
    inputs = service.engine.inputs
    whole = SamplingParams(
        max_tokens=params.max_tokens,
        truncate_prompt_tokens=truncate,
        stop_token_ids=params.stop_token_ids,
    )
    requests = [inputs.process(prompt, whole)[1] for prompt in prompts]
    num_tokens = sum(len(one.prompt_token_ids) for one in requests)
    width = params.beam_width  # each beam is a request of its own
    check_queue(service.engine, service.config, len(requests) * width, num_tokens * width)
    searches = [BeamSearch(one.prompt_token_ids, params, one.eos_token_ids) for one in requests]
    name = f"{request_id}-{uuid.uuid4().hex[:8]}"
    timeout = service.config.request_timeout
    try:
        # Of all steps together: to the engine each is a request of its own.
        async with asyncio.timeout(timeout):
            await _run(service, searches, name, priority)
    except TimeoutError:
        raise RequestTimeoutError(f"The request was not finished within {timeout:g} s.") from None
    return searches


async def _run(service: Service, searches: Sequence[BeamSearch], name: str, priority: int) -> None:
    step = 0
    while running := [search for search in searches if not search.finished]:
        beams = [(search, beam) for search in running for beam in search.prompts]
        streams: list[RequestStream] = []
        try:
            for index, (search, beam) in enumerate(beams):
                id = f"{name}-{step}-{index}"
                streams.append(
                    await service.engine.submit(
                        beam, search.step_params, request_id=id, priority=priority
                    )
                )
            reported = iter([await _first_logprobs(stream) for stream in streams])
        finally:
            for stream in streams:
                stream.close()
        for search in running:
            search.advance([next(reported) for _ in search.prompts])
        step += 1


async def _first_logprobs(stream: RequestStream) -> PositionLogprobs:
    found: list[PositionLogprobs] = []
    async for delta in stream:
        found += delta.logprobs or []
    if not found:
        raise EngineError("The request was ended before its beams were complete.")
    return found[0]
