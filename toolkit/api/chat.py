"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    TokenLogprob,
    TopLogprob,
)
from toolkit.api.service import Group, Service, prompt_logprobs_json, start
from toolkit.api.streaming import DONE, HOLE, EventStream, EventTemplate, event, while_connected
from toolkit.engine.outputs import PositionLogprobs
from toolkit.engine.tokenizer import Tokenizer

router = APIRouter(tags=["OpenAI"])
LONG_CONVERSATION = 20_000
"""Characters above which a conversation is rendered and tokenized in a thread."""


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    params = body.params(service.engine.default_sampling)
    messages, options = body.conversation(), body.template_options()
    if sum(len(m["content"]) for m in messages) > LONG_CONVERSATION:
        prompt = await asyncio.to_thread(lambda: service.engine.chat_prompt(messages, **options))
    else:
        prompt = service.engine.chat_prompt(messages, **options)
    request_id = f"chatcmpl-{request.state.request_id}"
    group = await start(service, [prompt], params, request_id=request_id, priority=body.priority)
    head = {"id": request_id, "created": int(time.time()), "model": service.model_name}
    tokenizer = service.engine.tokenizer
    assert tokenizer is not None, "without a tokenizer there is no chat prompt"
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        head["object"] = "chat.completion.chunk"
        return EventStream(_events(group, head, tokenizer, params.logprobs or 0, usage), group.close)
    try:
        head["object"] = "chat.completion"
        done = await while_connected(request, _collect(group, head, tokenizer, params.logprobs or 0))
    finally:
        group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")


async def _events(
    group: Group, head: dict[str, Any], tokenizer: Tokenizer, top: int, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    usage = None if include_usage else msgspec.UNSET

    def chunk(choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**head, choices=[choice], usage=usage)

    plain = [EventTemplate(chunk(ChatChunkChoice(i, ChatDelta(content=HOLE)))) for i in range(group.n)]
    yield b"".join(event(chunk(ChatChunkChoice(i, ChatDelta("assistant", "")))) for i in range(group.n))
    async for index, delta in group.deltas():
        if delta.logprobs:
            part = ChatChunkChoice(index, ChatDelta(content=delta.text))
            part.logprobs = ChatLogprobs([_logprob(p, tokenizer, top) for p in delta.logprobs])
            yield event(chunk(part))
        elif delta.text:
            yield plain[index].event(delta.text)
        if delta.finish_reason is not None:
            yield event(chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=delta.finish_reason)))
    if include_usage:
        yield event(ChatChunk(**head, choices=[], usage=group.usage())) + DONE
    else:
        yield DONE


async def _collect(group: Group, head: dict[str, Any], tokenizer: Tokenizer, top: int) -> ChatCompletion:
    choices = [ChatChoice(i, AssistantMessage("assistant", "")) for i in range(group.n)]
    texts: list[list[str]] = [[] for _ in choices]
    prompt_logprobs: list[dict[str, Any] | None] = []
    async for index, delta in group.deltas():
        choice = choices[index]
        texts[index].append(delta.text)
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or ChatLogprobs([])
            choice.logprobs.content += [_logprob(p, tokenizer, top) for p in delta.logprobs]
        if delta.prompt_logprobs is not None:
            prompt_logprobs += prompt_logprobs_json(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        choice.message.content = "".join(parts)
    done = ChatCompletion(**head, choices=choices, usage=group.usage())
    if prompt_logprobs:
        done.prompt_logprobs = prompt_logprobs
    return done


def _logprob(position: PositionLogprobs, tokenizer: Tokenizer, top: int) -> TokenLogprob:
    """The chosen token, then the likeliest `top`; the chosen one is among those only when it is likely
    enough.
    """
    entries = [
        TopLogprob(lp.decoded_token, lp.logprob, list(tokenizer.token_bytes(token)))
        for token, lp in position.items()
    ]
    chosen = entries[0]
    rank = next(iter(position.values())).rank or 0
    likeliest = sorted(entries, key=lambda e: -e.logprob)[:top] if rank <= top else entries[1 : top + 1]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, likeliest)
