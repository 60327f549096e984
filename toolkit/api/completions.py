"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.schemas import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from toolkit.api.service import Group, Service, prompt_logprobs_json, start
from toolkit.api.streaming import DONE, HOLE, EventStream, EventTemplate, event, while_connected
from toolkit.engine.outputs import Delta, PositionLogprobs

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues one or several prompts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    params = body.params(service.engine.default_sampling)
    request_id = f"cmpl-{request.state.request_id}"
    group = await start(service, body.prompts(), params, request_id=request_id, priority=body.priority)
    head = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
    }
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_events(group, head, usage), group.close)
    try:
        done = await while_connected(request, _collect(group, head))
    finally:
        group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")


async def _events(group: Group, head: dict[str, Any], include_usage: bool) -> AsyncGenerator[bytes, None]:
    usage = None if include_usage else msgspec.UNSET

    def chunk(part: CompletionChoice) -> Completion:
        return Completion(**head, choices=[part], usage=usage)

    num_choices = len(group.streams) * group.n
    plain = [EventTemplate(chunk(CompletionChoice(i, HOLE))) for i in range(num_choices)]
    offsets = [0] * num_choices
    async for choice, delta in group.deltas():
        if delta.finish_reason is None and delta.logprobs is None:
            if delta.text or delta.token_ids:
                yield plain[choice].event(delta.text)
            continue
        part = CompletionChoice(choice, delta.text, None, delta.finish_reason, delta.stop_reason)
        if delta.logprobs is not None:
            part.logprobs = CompletionLogprobs([], [], [], [])
            offsets[choice] = _add_logprobs(part.logprobs, delta.logprobs, offsets[choice])
        yield event(chunk(part))
    if include_usage:
        yield event(Completion(**head, choices=[], usage=group.usage())) + DONE
    else:
        yield DONE


async def _collect(group: Group, head: dict[str, Any]) -> Completion:
    choices = [CompletionChoice(i, "") for i in range(len(group.streams) * group.n)]
    offsets = [0] * len(choices)
    texts: list[list[str]] = [[] for _ in choices]
    async for index, delta in group.deltas():
        choice = choices[index]
        texts[index].append(delta.text)
        _add(choice, delta)
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or CompletionLogprobs([], [], [], [])
            offsets[index] = _add_logprobs(choice.logprobs, delta.logprobs, offsets[index])
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return Completion(**head, choices=choices, usage=group.usage())


def _add(choice: CompletionChoice, delta: Delta) -> None:
    if delta.prompt_logprobs is not None:
        before = choice.prompt_logprobs if isinstance(choice.prompt_logprobs, list) else []
        choice.prompt_logprobs = before + prompt_logprobs_json(delta.prompt_logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason


def _add_logprobs(logprobs: CompletionLogprobs, positions: list[PositionLogprobs], offset: int) -> int:
    """Appends positions; returns the text offset after them."""
    for position in positions:
        chosen = next(iter(position.values()))
        logprobs.tokens.append(chosen.decoded_token)
        logprobs.token_logprobs.append(chosen.logprob)
        logprobs.top_logprobs.append({lp.decoded_token: lp.logprob for lp in reversed(position.values())})
        logprobs.text_offset.append(offset)
        offset += len(chosen.decoded_token)
    return offset
