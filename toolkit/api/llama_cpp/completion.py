"""POST /completion: llama.cpp's own route for texts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import JsonRoute
from toolkit.api.http.error_bodies import error_body
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import Target, target_of
from toolkit.api.http.streaming import EventStream, event, while_connected
from toolkit.api.llama_cpp.requests import LlamaCompletionRequest, LlamaPrompt
from toolkit.api.openai.generation import AnswerGroup, start_group
from toolkit.api.openai.replies import Timings
from toolkit.engine.async_llm import LONG_TEXT
from toolkit.engine.front.input_processor import Prompt
from toolkit.engine.outputs import Delta
from toolkit.sampling.params import SamplingParams
from toolkit.text.tokenizer import Tokenizer

router = APIRouter(tags=["llama.cpp"], route_class=JsonRoute)
_ANSWERS = answers({"description": "An answer; a list of them for several prompts"}, stream=True)
_STOP_TYPES = {"length": "limit", "abort": "none"}


class LlamaPart(msgspec.Struct, kw_only=True):
    """Event of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1  # there are none
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class LlamaCompletion(LlamaPart, kw_only=True):
    """Complete answer, or the last event of its stream."""

    model: str
    prompt: str
    generation_settings: dict[str, Any]
    truncated: bool  # the context has ended the answer
    stop_type: str
    stopping_word: str
    tokens_cached: int


@router.post("/completion", response_model=None, responses=_ANSWERS)
@router.post("/completions", response_model=None, responses=_ANSWERS)
@access(Access.MODEL_WORK)
async def completion(body: LlamaCompletionRequest, request: Request) -> Response:
    """Continue one or several prompts; several get a list of answers."""
    target = target_of(request, body)
    params = body.params(target.engine.default_sampling, target.engine.tokenizer)
    prompts = [await _tokenized(target, prompt) for prompt in body.prompts]
    id = f"llama-{request.state.request_id}"
    group = await start_group(target, prompts, params, request_id=id, priority=0)
    writer = _Writer(target, group, body, params)
    if body.stream:
        return EventStream(
            _events(group, writer),
            group.close,
            target.server.config.sse_keep_alive,
            lambda error: b"data: " + error_body(error) + b"\n\n",
        )
    try:
        done = await while_connected(request, _collect(group, writer))
    finally:
        group.close()
    found = [writer.chosen(one) for one in done]
    content = msgspec.json.encode(found[0] if len(found) == 1 else found)
    return Response(content, media_type="application/json")


async def _tokenized(target: Target, prompt: LlamaPrompt) -> Prompt:
    """Return the tokens of a prompt of tokens and texts; a text as it is."""
    if isinstance(prompt, str):
        return prompt
    texts = [one for one in prompt if isinstance(one, str)]
    if not texts:
        return [one for one in prompt if isinstance(one, int)]
    inputs = target.engine.inputs
    tokenizer = inputs.require_tokenizer()
    inputs.check_length("".join(texts))

    def encode() -> list[int]:
        token_ids: list[int] = []
        for index, one in enumerate(prompt):
            if isinstance(one, int):
                token_ids.append(one)
            else:
                token_ids += tokenizer.encode(one, add_special_tokens=index == 0)
        return token_ids

    return await asyncio.to_thread(encode) if sum(map(len, texts)) > LONG_TEXT else encode()


async def _events(group: AnswerGroup, writer: "_Writer") -> AsyncGenerator[bytes, None]:
    async for index, delta in group.deltas():
        part = writer.part(index, delta)
        is_end = delta.finish_reason is not None
        if part.content or part.tokens:
            yield event(part)
        if is_end:
            part.content, part.tokens = "", []
            part.completion_probabilities = msgspec.UNSET
            yield event(writer.chosen(writer.end(part, delta)))


async def _collect(group: AnswerGroup, writer: "_Writer") -> list[LlamaCompletion]:
    """Return the answers in the order of their prompts."""
    texts, tokens = [[""] for _ in writer.counts], [list[int]() for _ in writer.counts]
    probabilities = [list[dict[str, Any]]() for _ in writer.counts]
    done: dict[int, LlamaCompletion] = {}
    async for index, delta in group.deltas():
        part = writer.part(index, delta)
        texts[index].append(part.content)
        tokens[index] += part.tokens
        if part.completion_probabilities is not msgspec.UNSET:
            probabilities[index] += part.completion_probabilities
        if delta.finish_reason is not None:
            part.content = "".join(texts[index])
            part.tokens = tokens[index] if writer.body.return_tokens else []
            if writer.body.n_probs:
                part.completion_probabilities = probabilities[index]
            done[index] = writer.end(part, delta)
    return [done[index] for index in sorted(done)]


@dataclass
class _Writer:
    """Writes the answers of one request."""

    target: Target
    group: AnswerGroup
    body: LlamaCompletionRequest
    params: SamplingParams

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.group.streams) * self.group.n)  # tokens of each answer
        self.settings = settings_of(self.params) | {"stream": self.body.stream}

    def part(self, index: int, delta: Delta) -> LlamaPart:
        """Return what a delta adds to an answer."""
        self.counts[index] += len(delta.token_ids)
        stream = self.group.streams[index // self.group.n]
        part = LlamaPart(
            index=index,
            content=delta.text,
            tokens=delta.token_ids,
            tokens_predicted=self.counts[index],
            tokens_evaluated=len(stream.state.prompt_token_ids),
        )
        if delta.logprobs is not None and (tokenizer := self.target.engine.tokenizer) is not None:
            records = delta.logprobs.records()
            part.completion_probabilities = [
                _probabilities(record, tokenizer, self.body.n_probs) for record in records
            ]
        if self.body.timings_per_token:
            part.timings = self.group.timings(index)
        return part

    def end(self, part: LlamaPart, delta: Delta) -> LlamaCompletion:
        """Return the last event of an answer, or all of it, with what `part` has."""
        state = self.group.streams[part.index // self.group.n].state
        reason, word = delta.finish_reason or "", delta.stop_reason
        tokenizer, prompt = self.target.engine.tokenizer, state.prompt
        if prompt is None:
            ids = state.prompt_token_ids
            prompt = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
        length = part.tokens_evaluated + part.tokens_predicted
        is_word = isinstance(word, str)
        return LlamaCompletion(
            **{
                **msgspec.structs.asdict(part),
                "stop": True,
                "timings": self.group.timings(part.index),
            },
            model=self.target.name,
            prompt=prompt,
            generation_settings=self.settings,
            truncated=reason == "length" and length >= self.target.engine.info.max_model_len,
            stop_type="word" if is_word else _STOP_TYPES.get(reason, "eos"),
            stopping_word=word if isinstance(word, str) else "",
            tokens_cached=state.num_cached_tokens,
        )

    def chosen(self, done: LlamaCompletion) -> LlamaCompletion | dict[str, Any]:
        """Return the fields that the request names. "a/b" is field b of object a."""
        if not (names := self.body.response_fields):
            return done
        fields, found = msgspec.to_builtins(done), {}
        for name in names:
            value = fields
            for key in name.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found[name.rpartition("/")[2]] = value
        return found


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters with llama.cpp's names."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1 if params.penalty_window is None else params.penalty_window,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop_strings,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
    }


def _probabilities(record: Sequence[Any], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """Return the chosen token of a position, and the `top` likeliest."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token,
            "token": tokenizer.token_names[token],
            "bytes": tokenizer.byte_lists[token],
            "logprob": logprob,
        }

    likeliest = list(zip(record[3::2], record[4::2], strict=True))[:top]
    return one(record[1], record[2]) | {"top_logprobs": [one(*pair) for pair in likeliest]}
