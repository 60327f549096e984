"""Beam search for completions: each step requests one token of every unfinished beam."""

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

MAX_BEAMS = 1024  # of one request, over all its prompts


async def run_beam_search(
    service: Service,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    *,
    truncate: int | None,
    request_id: str,
    priority: int,
) -> list[BeamSearch]:
    """Return the finished search of each prompt. `truncate`: the request's truncate_prompt_tokens.

    Raises InvalidRequestError for a prompt that cannot run, TooManyRequestsError, EngineError if
    a request fails, and RequestTimeoutError if the complete search takes too long."""
    if len(prompts) * params.beam_width > MAX_BEAMS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {params.beam_width} beams each exceed the limit of "
            f"{MAX_BEAMS} beams in one request.",
            param="best_of",
        )
    inputs = service.engine.inputs
    prompt_params = SamplingParams(
        max_tokens=params.max_tokens,
        truncate_prompt_tokens=truncate,
        stop_token_ids=params.stop_token_ids,
    )
    requests = [inputs.process(prompt, prompt_params)[1] for prompt in prompts]
    num_tokens = sum(one.spec.num_prompt_tokens for one in requests)
    width = params.beam_width  # each beam is a request of its own
    check_queue(service.engine, service.config, len(requests) * width, num_tokens * width)
    searches = [
        BeamSearch(one.spec.prompt_token_ids, params, one.spec.eos_token_ids) for one in requests
    ]
    name = f"{request_id}-{uuid.uuid4().hex[:8]}"
    timeout = service.config.request_timeout
    try:
        # The engine's own limit applies to each step: a step is a request.
        async with asyncio.timeout(timeout):
            await _run(service, searches, name, priority)
    except TimeoutError:
        raise RequestTimeoutError(f"The request did not finish within {timeout:g} s.") from None
    return searches


async def _run(service: Service, searches: Sequence[BeamSearch], name: str, priority: int) -> None:
    step = 0
    while running := [search for search in searches if not search.is_finished]:
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
        raise EngineError("The request was aborted before its beams were complete.")
    return found[0]
