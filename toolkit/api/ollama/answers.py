"""Answers in Ollama's format: one object, or a line of JSON for each part."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import msgspec
from fastapi import Request
from starlette.responses import Response

from toolkit.api.http.error_bodies import ollama_error
from toolkit.api.http.server import Target
from toolkit.api.http.streaming import EventStream, while_connected
from toolkit.api.ollama.replies import (
    Measures,
    OllamaChatReply,
    OllamaGenerateReply,
    ReplyCall,
    ReplyFunction,
    ReplyMessage,
    now,
)
from toolkit.api.openai.answer_parts import AnswerPart
from toolkit.api.openai.conversation import ChatAnswer
from toolkit.api.openai.replies import TokenLogprob
from toolkit.api.openai.tools import parse_arguments
from toolkit.engine.front.request_stats import RequestStats, current_stats

LINES = "application/x-ndjson"
_encoder = msgspec.json.Encoder()


class LineStream(EventStream):
    """Stream of lines of JSON. There are no comments, so idle streams send nothing."""

    media_type = LINES


@dataclass(slots=True)
class Piece:
    """Part of an answer, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: list[ReplyCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, later: "Piece") -> None:
        self.content += later.content
        self.thinking += later.thinking
        self.calls += later.calls


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the replies of one request. `is_chat`: they have a message, not a response."""

    model: str
    is_chat: bool

    def reply(self, piece: Piece, measures: Measures | None = None) -> bytes:
        """Return the JSON of a part; with `measures`, of the end or of the complete answer."""
        end = {} if measures is None else msgspec.structs.asdict(measures)
        created, is_done = now(), measures is not None
        thinking, logprobs = piece.thinking or msgspec.UNSET, piece.logprobs or msgspec.UNSET
        if not self.is_chat:
            return _encoder.encode(
                OllamaGenerateReply(
                    model=self.model,
                    created_at=created,
                    response=piece.content,
                    thinking=thinking,
                    logprobs=logprobs,
                    done=is_done,
                    **end,
                )
            )
        message = ReplyMessage(piece.content, thinking, piece.calls or msgspec.UNSET)
        return _encoder.encode(
            OllamaChatReply(
                model=self.model,
                created_at=created,
                message=message,
                logprobs=logprobs,
                done=is_done,
                **end,
            )
        )


def empty_answer(writer: Writer, *, is_unload: bool) -> Response:
    """Answer a request without a prompt: clients send it to load or unload a model."""
    measures = Measures(done_reason="unload" if is_unload else "load")
    return Response(writer.reply(Piece(), measures), media_type="application/json")


async def send_answer(
    answer: ChatAnswer, writer: Writer, target: Target, request: Request, *, is_streamed: bool
) -> Response:
    """Return the response of a running answer."""
    record = current_stats.get()
    assert record is not None, "the gate sets it"
    if is_streamed:
        return LineStream(
            _lines(answer, writer, record),
            answer.group.close,
            error_event=lambda error: ollama_error(error) + b"\n",
        )
    try:
        whole = await while_connected(request, _collect(answer))
    finally:
        answer.group.close()
    body = writer.reply(whole, _measure(answer, record))
    return Response(body, media_type="application/json")


async def _lines(
    answer: ChatAnswer, writer: Writer, record: RequestStats
) -> AsyncGenerator[bytes, None]:
    async for piece in _pieces(answer):
        piece.logprobs = answer.take_logprobs()
        yield writer.reply(piece) + b"\n"
    rest = Piece(logprobs=answer.take_logprobs())
    yield writer.reply(rest, _measure(answer, record)) + b"\n"


async def _collect(answer: ChatAnswer) -> Piece:
    whole = Piece()
    async for piece in _pieces(answer):
        whole.add(piece)
    whole.logprobs = answer.take_logprobs()
    return whole


async def _pieces(answer: ChatAnswer) -> AsyncIterator[Piece]:
    """Yield the answer as it arrives, each call once it is complete.

    Messages of one kind are joined by empty lines."""
    call: AnswerPart | None = None
    texts: list[str] = []  # arguments of the call
    seen: set[str] = set()  # kinds of text so far
    num_calls = 0
    async for part in answer.parts():
        if call is not None and (part.kind != "call" or part.begins):
            yield _call_piece(call, texts, num_calls)
            num_calls += 1
            call = None
        if part.kind == "call":
            if call is None:
                call, texts = part, []
            texts.append(part.text)
            continue
        text = "\n\n" + part.text if part.begins and part.kind in seen else part.text
        seen.add(part.kind)
        yield Piece(thinking=text) if part.kind == "reasoning" else Piece(text)
    if call is not None:
        yield _call_piece(call, texts, num_calls)


def _call_piece(first: AnswerPart, texts: list[str], index: int) -> Piece:
    function = ReplyFunction(first.name or "", parse_arguments("".join(texts)), index)
    return Piece(calls=[ReplyCall(first.id or "", function)])


def _measure(answer: ChatAnswer, record: RequestStats) -> Measures:
    """Return the end of an answer. Its prompt is computed between the start and the first token."""
    usage = answer.group.usage()
    ended = time.monotonic()
    stream = record.streams[-1]
    sequence = stream.state.sequences[0]
    started = stream.scheduled or stream.arrival
    first = sequence.first_token or ended
    last = sequence.last_token or ended
    # Clients divide by some of them, so none is 0.
    load, prompt, output, total = (
        max(1, round(1e9 * seconds))
        for seconds in (
            started - record.started,
            first - started,
            last - first,
            ended - record.started,
        )
    )
    reason = "stop" if answer.finish_reason == "tool_calls" else answer.finish_reason
    return Measures(
        done_reason=reason,
        total_duration=total,
        load_duration=load,
        prompt_eval_count=usage.prompt_tokens,
        prompt_eval_duration=prompt,
        eval_count=usage.completion_tokens,
        eval_duration=output,
    )
