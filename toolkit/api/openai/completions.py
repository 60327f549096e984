"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.service import service_for
from toolkit.api.http.streaming import (
    DONE,
    TEXT_SLOT,
    EventStream,
    EventTemplate,
    event,
    while_connected,
)
from toolkit.api.openai.beams import start_beams
from toolkit.api.openai.conversation import rename_params
from toolkit.api.openai.generation import AnswerGroup, prompt_logprobs_json, start_group
from toolkit.api.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from toolkit.api.openai.schemas import CompletionRequest
from toolkit.engine.outputs import Delta, LogprobList, PositionLogprobs, unique_pairs
from toolkit.text.tokenizer import Tokenizer

router = APIRouter(tags=["OpenAI"], route_class=Route)


@router.post("/v1/completions", response_model=None, responses=answers(Completion, stream=True))
@access(Access.MODEL_WORK)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    service = service_for(request, body)
    request_id = f"cmpl-{request.state.request_id}"
    head = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
    }
    with rename_params(body.param_names):
        params = body.params(service.engine.default_sampling)
        if body.use_beam_search:
            group = await start_beams(service, body.prompts(), body, request_id=request_id)
        else:
            group = await start_group(
                service,
                body.prompts(),
                params,
                request_id=request_id,
                priority=body.priority,
                counts_tokens=not body.is_prompt_only,
            )
    builder = _ChoiceBuilder(group, body, service.engine.tokenizer)
    if body.stream:
        events = _events(group, builder, head, body)
        return EventStream(events, group.close, service.config.sse_keep_alive)
    try:
        done = await while_connected(request, _collect(group, builder, head, body))
    finally:
        group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")


async def _events(
    group: AnswerGroup, builder: _ChoiceBuilder, head: dict[str, Any], body: CompletionRequest
) -> AsyncGenerator[bytes, None]:
    usage = None if body.has_final_usage else msgspec.UNSET
    is_continuous = body.has_continuous_usage

    def chunk(part: CompletionChoice) -> Completion:
        return Completion(**head, choices=[part], usage=group.usage() if is_continuous else usage)

    plain = [
        EventTemplate(chunk(CompletionChoice(i, TEXT_SLOT))) for i in range(builder.num_choices)
    ]
    needs_builder = body.echo or body.return_token_ids or is_continuous
    async for choice, delta in group.deltas():
        if delta.finish_reason is None and delta.logprobs is None and not needs_builder:
            if delta.text or delta.token_ids:
                yield plain[choice].event(delta.text)
            continue
        part = builder.part(choice, delta)
        if part is not None:
            yield event(chunk(part))
    if body.has_final_usage:
        yield event(Completion(**head, choices=[], usage=group.usage())) + DONE
    else:
        yield DONE


async def _collect(
    group: AnswerGroup, builder: _ChoiceBuilder, head: dict[str, Any], body: CompletionRequest
) -> Completion:
    choices = [CompletionChoice(i, "") for i in range(builder.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async for index, delta in group.deltas():
        part = builder.part(index, delta)
        if part is not None:
            texts[index].append(part.text)
            _append(choices[index], part)
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    if body.prompt_logprobs is not None:
        for index in range(0, len(choices), group.n):  # only the first answer of each prompt
            choices[index].prompt_logprobs = prompt_logprobs_json(
                builder.prompt_logprobs[index // group.n]
            )
    if body.needs_selection:
        choices = builder.select_likeliest(choices, body.n or 1)
        if body.logprobs is None:
            for choice in choices:
                choice.logprobs = None
    return Completion(**head, choices=choices, usage=group.usage())


class _ChoiceBuilder:
    """Builds choices from engine deltas, with the echoed prompt, token ids and logprobs."""

    def __init__(
        self, group: AnswerGroup, body: CompletionRequest, tokenizer: Tokenizer | None
    ) -> None:
        self.num_choices = len(group.streams) * group.n
        self.prompt_logprobs: list[LogprobList[PositionLogprobs | None]] = [
            LogprobList(tokenizer) for _ in group.streams
        ]
        self._group, self._body, self._tokenizer = group, body, tokenizer
        self._has_begun = [False] * self.num_choices
        self._offsets = [0] * self.num_choices
        self._logprob_sums = [0.0] * self.num_choices

    def part(self, choice: int, delta: Delta) -> CompletionChoice | None:
        """Return what a delta adds to a choice; None if there is nothing to send yet."""
        body, prompt = self._body, choice // self._group.n
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[prompt].extend(delta.prompt_logprobs)
        if not delta.token_ids and delta.finish_reason is None:
            return None
        part = CompletionChoice(choice, "", None, delta.finish_reason, delta.stop_reason)
        if body.return_token_ids:
            part.token_ids = []
        if not self._has_begun[choice]:
            self._has_begun[choice] = True
            self._add_prompt(part, prompt)
        if body.is_prompt_only:
            part.stop_reason, part.finish_reason = None, delta.finish_reason and "length"
            return part
        part.text += delta.text
        if body.return_token_ids:
            part.token_ids = delta.token_ids
        if delta.logprobs is not None:
            self._logprob_sums[choice] += sum(delta.logprobs.chosen())
            part.logprobs = part.logprobs or CompletionLogprobs([], [], [], [])
            self._add_logprobs(part.logprobs, delta.logprobs, choice)
        return part

    def select_likeliest(self, choices: list[CompletionChoice], n: int) -> list[CompletionChoice]:
        """Return the n likeliest answers of each prompt, best first."""
        kept: list[CompletionChoice] = []
        for first in range(0, len(choices), self._group.n):
            answers = choices[first : first + self._group.n]
            prompt_logprobs = answers[0].prompt_logprobs
            answers.sort(key=lambda choice: -self._logprob_sums[choice.index])
            kept += answers[:n]
            answers[0].prompt_logprobs = prompt_logprobs
        for index, choice in enumerate(kept):
            choice.index = index
        return kept

    def _add_prompt(self, part: CompletionChoice, prompt: int) -> None:
        state = self._group.streams[prompt].state
        if self._body.return_token_ids:
            part.prompt_token_ids = state.prompt_token_ids
        if not self._body.echo:
            return
        if state.prompt is not None:
            part.text = state.prompt
        elif self._tokenizer is not None:
            part.text = self._tokenizer.decode(
                state.prompt_token_ids, skip_special_tokens=self._body.skip_special_tokens
            )
        if self._body.logprobs is not None:
            part.logprobs = CompletionLogprobs([], [], [], [])
            self._add_logprobs(
                part.logprobs, self.prompt_logprobs[prompt], part.index, state.prompt_token_ids
            )

    def _add_logprobs(
        self,
        logprobs: CompletionLogprobs,
        positions: LogprobList[PositionLogprobs] | LogprobList[PositionLogprobs | None],
        choice: int,
        prompt: list[int] | None = None,
    ) -> None:
        """Append `positions`, those of a prompt with `prompt`: its first token has no logprob."""
        if positions.starts_prompt:
            assert prompt, "only a prompt has a token without a log-probability"
            self._add_token(logprobs, prompt[0], choice)
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
        top = self._body.logprobs or 0
        for record in positions.records():
            self._add_token(logprobs, record[1], choice)
            logprobs.token_logprobs.append(record[2])
            reported = unique_pairs(record)[: top + 1]
            logprobs.top_logprobs.append(
                {self._text_of(token): logprob for token, logprob in reversed(reported)}
            )

    def _add_token(self, logprobs: CompletionLogprobs, token: int, choice: int) -> None:
        text, tokenizer = self._text_of(token), self._tokenizer
        logprobs.tokens.append(text)
        logprobs.text_offset.append(self._offsets[choice])
        is_hidden = (
            self._body.skip_special_tokens and tokenizer is not None and tokenizer.is_special(token)
        )
        self._offsets[choice] += 0 if is_hidden else len(text)

    def _text_of(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token)


def _append(choice: CompletionChoice, part: CompletionChoice) -> None:
    """Add everything of `part` but its text to `choice`."""
    if part.logprobs is not None:
        logprobs = choice.logprobs = choice.logprobs or CompletionLogprobs([], [], [], [])
        logprobs.tokens += part.logprobs.tokens
        logprobs.token_logprobs += part.logprobs.token_logprobs
        logprobs.top_logprobs += part.logprobs.top_logprobs
        logprobs.text_offset += part.logprobs.text_offset
    if not isinstance(part.token_ids, msgspec.UnsetType):
        before = [] if isinstance(choice.token_ids, msgspec.UnsetType) else choice.token_ids
        choice.token_ids = before + part.token_ids
    if part.prompt_token_ids is not msgspec.UNSET:
        choice.prompt_token_ids = part.prompt_token_ids
    if part.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason
