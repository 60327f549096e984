"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.service import service_for
from toolkit.api.http.streaming import (
    DONE,
    HOLE,
    EventStream,
    EventTemplate,
    event,
    while_connected,
)
from toolkit.api.openai.answer_parts import AnswerPlan
from toolkit.api.openai.conversation import begin, named_as
from toolkit.api.openai.generation import Group, prompt_logprobs_json
from toolkit.api.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
)
from toolkit.api.openai.schemas import ChatRequest
from toolkit.engine.outputs import PositionLogprobs
from toolkit.text.tokenizer import Tokenizer

router = APIRouter(tags=["OpenAI"], route_class=Route)
_NOTHING = ChatDelta()


@router.post(
    "/v1/chat/completions", response_model=None, responses=answers(ChatCompletion, stream=True)
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    service = service_for(request, body)
    request_id = f"chatcmpl-{request.state.request_id}"
    names = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    with named_as(names):
        talk = await begin(service, body, request_id)
    group, tokenizer, plan, top = talk.group, talk.tokenizer, talk.plan, talk.params.logprobs or 0
    head = {"id": request_id, "created": int(time.time()), "model": service.model_name}
    if body.stream:
        head["object"] = "chat.completion.chunk"
        events = _events(group, head, tokenizer, top, body, plan)
        return EventStream(events, group.close, service.config.sse_keep_alive)
    try:
        head["object"] = "chat.completion"
        done = await while_connected(request, _collect(group, head, tokenizer, top, body, plan))
    finally:
        group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")


async def _events(
    group: Group,
    head: dict[str, Any],
    tokenizer: Tokenizer,
    top: int,
    body: ChatRequest,
    plan: AnswerPlan,
) -> AsyncGenerator[bytes, None]:
    usage = None if body.tells_usage else msgspec.UNSET
    keeps_telling = body.keeps_telling_usage

    def chunk(choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**head, choices=[choice], usage=group.usage() if keeps_telling else usage)

    plain = [
        EventTemplate(chunk(ChatChunkChoice(i, ChatDelta(content=HOLE)))) for i in range(group.n)
    ]
    special = body.return_token_ids or keeps_telling
    parsers = [plan.parser() for _ in range(group.n)] if plan.splits else None
    begin = [chunk(ChatChunkChoice(i, ChatDelta("assistant", ""))) for i in range(group.n)]
    if body.return_token_ids:
        begin[0].prompt_token_ids = group.streams[0].state.prompt_token_ids
    yield b"".join(map(event, begin))
    if body.echoed:
        yield b"".join(plain[i].event(body.echoed) for i in range(group.n))
    async for index, delta in group.deltas():
        told, reason = _NOTHING, delta.finish_reason
        if parsers is not None:
            told = parsers[index].add(delta.text, ended=reason is not None)
            reason = None if reason is None else parsers[index].finish_reason(reason)
        if delta.logprobs or (special and delta.token_ids) or told != _NOTHING:
            part = ChatChunkChoice(
                index, ChatDelta(content=delta.text) if parsers is None else told
            )
            if delta.logprobs:
                part.logprobs = ChatLogprobs([_logprob(p, tokenizer, top) for p in delta.logprobs])
            if body.return_token_ids:
                part.token_ids = delta.token_ids
            yield event(chunk(part))
        elif delta.text and parsers is None:
            yield plain[index].event(delta.text)
        if reason is not None:
            yield event(chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason)))
    if body.tells_usage:
        yield event(ChatChunk(**head, choices=[], usage=group.usage())) + DONE
    else:
        yield DONE


async def _collect(
    group: Group,
    head: dict[str, Any],
    tokenizer: Tokenizer,
    top: int,
    body: ChatRequest,
    plan: AnswerPlan,
) -> ChatCompletion:
    choices = [ChatChoice(i, AssistantMessage("assistant", "")) for i in range(group.n)]
    texts: list[list[str]] = [[] for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    prompt_logprobs: list[dict[str, Any] | None] = []
    async for index, delta in group.deltas():
        choice = choices[index]
        texts[index].append(delta.text)
        token_ids[index] += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or ChatLogprobs([])
            choice.logprobs.content += [_logprob(p, tokenizer, top) for p in delta.logprobs]
        if delta.prompt_logprobs is not None:
            prompt_logprobs += prompt_logprobs_json(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        parser = plan.parser()
        choice.message = parser.message("".join(parts))
        choice.finish_reason = parser.finish_reason(choice.finish_reason or "abort")
        if body.echoed:
            choice.message.content = body.echoed + (choice.message.content or "")
    done = ChatCompletion(**head, choices=choices, usage=group.usage())
    if prompt_logprobs:
        done.prompt_logprobs = prompt_logprobs
    if body.return_token_ids:
        done.prompt_token_ids = group.streams[0].state.prompt_token_ids
        for choice, tokens in zip(choices, token_ids, strict=True):
            choice.token_ids = tokens
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
    likeliest = (
        sorted(entries, key=lambda e: -e.logprob)[:top] if rank <= top else entries[1 : top + 1]
    )
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, likeliest)
