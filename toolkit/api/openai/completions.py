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
from toolkit.api.http.server import target_of
from toolkit.api.http.streaming import (
    DONE,
    TEXT_SLOT,
    EventStream,
    EventTemplate,
    event,
    while_connected,
)
from toolkit.api.openai.beams import start_beams
from toolkit.api.openai.generation import AnswerGroup, prompt_logprobs_json, start_group
from toolkit.api.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from toolkit.api.openai.schemas import CompletionRequest
from toolkit.engine.outputs import Delta, LogprobList, PositionLogprobs, unique_pairs
from toolkit.text.tokenizer import TextStream, Tokenizer, text_stream

router = APIRouter(tags=["OpenAI"], route_class=Route)


@router.post("/v1/completions", response_model=None, responses=answers(Completion, stream=True))
@access(Access.MODEL_WORK)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    target = target_of(request, body)
    request_id = f"cmpl-{request.state.request_id}"
    head = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": target.name,
        "system_fingerprint": target.model.fingerprint,
    }
    params = body.params(target.engine.default_sampling)
    if (beams := body.beams()) is not None:
        group = await start_beams(
            target, body.prompts(), beams, request_id=request_id, priority=body.priority
        )
    else:
        group = await start_group(
            target, body.prompts(), params, request_id=request_id, priority=body.priority
        )
    builder = _ChoiceBuilder(group, body, target.engine.tokenizer)
    if body.stream:
        events = _events(group, builder, head, body)
        return EventStream(events, group.close, target.server.config.sse_keep_alive)
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
        _bound_offsets(choice, len(choice.text))
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
        self._name_of = body.token_namer(tokenizer)
        self._has_begun = [False] * self.num_choices
        self._text_streams = [self._text_stream() for _ in range(self.num_choices)]
        self._offsets = [0] * self.num_choices  # of the next token
        self._lengths = [0] * self.num_choices  # of the text
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
        part.text += delta.text
        if body.return_token_ids:
            part.token_ids = delta.token_ids
        if delta.logprobs is not None:
            self._logprob_sums[choice] += sum(delta.logprobs.chosen())
            part.logprobs = part.logprobs or CompletionLogprobs([], [], [], [])
            self._add_logprobs(part.logprobs, delta.logprobs)
            part.logprobs.text_offset += self._answer_offsets(choice, delta.token_ids)
        self._lengths[choice] += len(part.text)
        if part.finish_reason is not None:
            _bound_offsets(part, self._lengths[choice])
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
            self._add_logprobs(part.logprobs, self.prompt_logprobs[prompt], state.prompt_token_ids)
            if self._tokenizer is not None:
                offsets = self._tokenizer.offsets(state.prompt_token_ids, part.text)
                part.logprobs.text_offset = offsets
            self._offsets[part.index] = len(part.text)

    def _add_logprobs(
        self,
        logprobs: CompletionLogprobs,
        positions: LogprobList[PositionLogprobs] | LogprobList[PositionLogprobs | None],
        prompt: list[int] | None = None,
    ) -> None:
        """Append `positions`, those of a prompt with `prompt`: its first token has no logprob."""
        if positions.starts_prompt:
            assert prompt, "only a prompt has a token without a log-probability"
            logprobs.tokens.append(self._name_of(prompt[0]))
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
        top = self._body.logprobs or 0
        for record in positions.records():
            logprobs.tokens.append(self._name_of(record[1]))
            logprobs.token_logprobs.append(record[2])
            reported = sorted(unique_pairs(record)[: top + 1], key=lambda pair: -pair[1])
            likeliest: dict[str, float] = {}
            for token, logprob in reported:
                name = self._name_of(token)
                likeliest[f"token_id:{token}" if name in likeliest else name] = logprob
            logprobs.top_logprobs.append(likeliest)

    def _text_stream(self) -> TextStream | None:
        if self._tokenizer is None or self._body.logprobs is None:
            return None
        return text_stream(
            self._tokenizer,
            skip_special_tokens=self._body.skip_special_tokens,
            spaces_between_special_tokens=self._body.spaces_between_special_tokens,
        )

    def _answer_offsets(self, choice: int, tokens: list[int]) -> list[int]:
        """Return where an answer's next tokens begin in its text, after an echoed prompt."""
        stream, offsets = self._text_streams[choice], []
        for token in tokens:
            before, added = (0, "") if stream is None else stream.place(token)
            offsets.append(self._offsets[choice] + before)
            self._offsets[choice] += len(added)
        return offsets


def _bound_offsets(choice: CompletionChoice, length: int) -> None:
    """Put tokens of a stop string, which the text lacks, at its end."""
    if choice.logprobs is not None:
        choice.logprobs.text_offset = [min(at, length) for at in choice.logprobs.text_offset]


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
