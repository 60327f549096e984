"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import target_of
from toolkit.api.http.streaming import (
    DONE,
    TEXT_SLOT,
    EventStream,
    EventTemplate,
    event,
    while_connected,
)
from toolkit.api.openai.answer_parts import AnswerParser, AnswerPlan
from toolkit.api.openai.conversation import start_answer
from toolkit.api.openai.generation import AnswerGroup, prompt_logprobs_json, token_logprobs
from toolkit.api.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from toolkit.api.openai.schemas import ChatRequest
from toolkit.text.tokenizer import Tokenizer

router = APIRouter(tags=["OpenAI"], route_class=Route)
_EMPTY = ChatDelta()


@router.post(
    "/v1/chat/completions", response_model=None, responses=answers(ChatCompletion, stream=True)
)
@access(Access.MODEL_WORK)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    target = target_of(request, body)
    request_id = f"chatcmpl-{request.state.request_id}"
    asked = body.to_conversation(target.engine.default_sampling)
    answer = await start_answer(target, asked, request, request_id)
    group, tokenizer, plan = answer.group, answer.tokenizer, answer.plan
    head = {
        "id": request_id,
        "created": int(time.time()),
        "model": target.name,
        "system_fingerprint": target.model.fingerprint,
    }
    if body.stream:
        head["object"] = "chat.completion.chunk"
        events = _events(group, head, tokenizer, body, plan)
        return EventStream(events, group.close, target.server.config.sse_keep_alive)
    try:
        head["object"] = "chat.completion"
        done = await while_connected(request, _collect(group, head, tokenizer, body, plan))
    finally:
        group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")


async def _events(
    group: AnswerGroup,
    head: dict[str, Any],
    tokenizer: Tokenizer,
    body: ChatRequest,
    plan: AnswerPlan,
) -> AsyncGenerator[bytes, None]:
    usage = None if body.has_final_usage else msgspec.UNSET
    top, name_of = body.top_logprobs or 0, body.token_namer(tokenizer)
    is_continuous = body.has_continuous_usage

    def chunk(choice: ChatChunkChoice) -> ChatChunk:
        made = ChatChunk(**head, choices=[choice], usage=group.usage() if is_continuous else usage)
        if body.timings_per_token:
            made.timings = group.timings(choice.index)
        return made

    plain = [
        EventTemplate(chunk(ChatChunkChoice(i, ChatDelta(content=TEXT_SLOT))))
        for i in range(group.n)
    ]
    has_token_data = body.return_token_ids or is_continuous or body.timings_per_token
    parsers = [AnswerParser(plan) for _ in range(group.n)] if plan.has_parts else None
    first = [chunk(ChatChunkChoice(i, ChatDelta("assistant", ""))) for i in range(group.n)]
    if body.return_token_ids:
        first[0].prompt_token_ids = group.streams[0].state.prompt_token_ids
    yield b"".join(map(event, first))
    if body.echo_text:
        yield b"".join(plain[i].event(body.echo_text) for i in range(group.n))
    async for index, delta in group.deltas():
        parsed, reason = _EMPTY, delta.finish_reason
        if parsers is not None:
            parsed = parsers[index].add(delta.text, reason, delta.stop_reason)
            reason = None if reason is None else parsers[index].finish_reason(reason)
        if delta.logprobs or (has_token_data and delta.token_ids) or parsed != _EMPTY:
            choice = ChatChunkChoice(
                index, ChatDelta(content=delta.text) if parsers is None else parsed
            )
            if delta.logprobs:
                logprobs = token_logprobs(delta.logprobs, tokenizer, top, name_of)
                choice.logprobs = ChatLogprobs(logprobs)
            if body.return_token_ids:
                choice.token_ids = delta.token_ids
            yield event(chunk(choice))
        elif delta.text and parsers is None:
            yield plain[index].event(delta.text)
        if reason is not None:
            yield event(chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason)))
    if body.has_final_usage:
        yield event(ChatChunk(**head, choices=[], usage=group.usage())) + DONE
    else:
        yield DONE


async def _collect(
    group: AnswerGroup,
    head: dict[str, Any],
    tokenizer: Tokenizer,
    body: ChatRequest,
    plan: AnswerPlan,
) -> ChatCompletion:
    choices = [ChatChoice(i, AssistantMessage("assistant", "")) for i in range(group.n)]
    texts: list[list[str]] = [[] for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    prompt_logprobs: list[dict[str, Any] | None] = []
    top, name_of = body.top_logprobs or 0, body.token_namer(tokenizer)
    async for index, delta in group.deltas():
        choice = choices[index]
        texts[index].append(delta.text)
        token_ids[index] += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or ChatLogprobs([])
            choice.logprobs.content += token_logprobs(delta.logprobs, tokenizer, top, name_of)
        if delta.prompt_logprobs is not None:
            prompt_logprobs += prompt_logprobs_json(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        parser, reason = AnswerParser(plan), choice.finish_reason or "abort"
        choice.message = parser.message("".join(parts), reason, choice.stop_reason)
        choice.finish_reason = parser.finish_reason(reason)
        if body.echo_text:
            choice.message.content = body.echo_text + (choice.message.content or "")
    done = ChatCompletion(**head, choices=choices, usage=group.usage())
    if body.timings_per_token:
        done.timings = group.timings(0)
    if prompt_logprobs:
        done.prompt_logprobs = prompt_logprobs
    if body.return_token_ids:
        done.prompt_token_ids = group.streams[0].state.prompt_token_ids
        for choice, tokens in zip(choices, token_ids, strict=True):
            choice.token_ids = tokens
    return done
