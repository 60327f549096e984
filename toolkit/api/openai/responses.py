"""/v1/responses: OpenAI's Responses API, for text, pictures and functions."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import Server, server_of, target_of
from toolkit.api.http.stored_responses import StoredResponse
from toolkit.api.http.streaming import EventStream, while_connected
from toolkit.api.openai.conversation import ChatAnswer, encode_conversation, start_answer
from toolkit.api.openai.response_events import ResponseBuilder
from toolkit.api.openai.response_request import (
    Item,
    ResponsesRequest,
    read_items,
    stored_items,
)
from toolkit.errors import InvalidRequestError, ToolkitError

router = APIRouter(tags=["OpenAI"], route_class=Route)
logger = logging.getLogger(__name__)

CANCEL_TIMEOUT = 2.0  # seconds for a cancelled response to be stored
CANCEL_INTERVAL = 0.02  # seconds


class NoSuchResponseError(ToolkitError):
    """No stored response has this id, or it belongs to another API key."""

    status = 404
    type = "invalid_request_error"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


@router.post(
    "/v1/responses", response_model=None, responses=answers("OpenAI's Response", stream=True)
)
@access(Access.MODEL_WORK)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input, which may continue the conversation of a stored response."""
    target = target_of(request, body)
    server, name = target.server, request.state.request_id
    is_stored = server.config.response_store > 0 and body.store is not False
    if body.background:
        _check_background(body, is_stored=is_stored)
    context, earlier = await _context(body, request)
    asked = body.to_conversation(target.engine.default_sampling, earlier)
    answer = await start_answer(target, asked, request, f"resp_{name}")
    record = StoredResponse(
        id=f"resp_{name}",
        owner=request.state.key,
        response=b"",
        items=msgspec.json.encode([*context, *stored_items(body.items, name)])
        if is_stored
        else b"",
        is_background=bool(body.background),
    )

    async def keep(response: dict[str, Any]) -> bool:
        record.response = msgspec.json.encode(response)
        return await server.responses.add(record)

    if body.background:
        return await _start_in_background(body, answer, record, request, target.name)
    builder = ResponseBuilder(body, answer, name, target.name, keep if is_stored else None)
    if body.stream:
        return EventStream(
            builder.events(),
            answer.group.close,
            server.config.sse_keep_alive,
            builder.error_event,
        )
    try:
        done = await while_connected(request, builder.collect())
    finally:
        answer.group.close()
    return _json(done)


@router.post("/v1/responses/input_tokens", response_model=None, responses=answers(InputTokens))
@access(Access.MODEL_WORK)
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Count the tokens of a response's prompt."""
    target = target_of(request, body)
    _, earlier = await _context(body, request)
    prompt = await encode_conversation(target, body.to_conversation({}, earlier), request)
    return _json(InputTokens(len(prompt)))


@router.get("/v1/responses/{id}", response_model=None, responses=answers("OpenAI's Response"))
async def find_response(id: str, request: Request, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise InvalidRequestError(
            "Stored responses are not streamed. Leave stream out.", param="stream"
        )
    record = await _find(request, id)
    return Response(record.response, media_type="application/json")


@router.delete("/v1/responses/{id}", response_model=None, responses=answers(DeletedResponse))
@access(Access.KEY)
async def delete_response(id: str, request: Request) -> Response:
    """Remove a stored response. If it runs in the background, it ends."""
    server = server_of(request)
    record = await server.responses.remove(request.state.key, id)
    if record is None:
        raise _missing(server, id)
    if record.engine_id:
        await server.end_requests(record.engine_id)
    return _json(DeletedResponse(id))


@router.post(
    "/v1/responses/{id}/cancel", response_model=None, responses=answers("OpenAI's Response")
)
@access(Access.KEY)
async def cancel_response(id: str, request: Request) -> Response:
    """End a response that runs in the background. Returns it with the answer so far."""
    record = await _find(request, id)
    if not record.is_background:
        raise InvalidRequestError(
            f"The response {id[:128]!r} cannot be cancelled: only those with background can."
        )
    if record.engine_id:
        await server_of(request).end_requests(record.engine_id)
    deadline = asyncio.get_running_loop().time() + CANCEL_TIMEOUT
    while record.engine_id and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(CANCEL_INTERVAL)
        record = await _find(request, id)
    return Response(record.response, media_type="application/json")


@router.get("/v1/responses/{id}/input_items", response_model=None, responses=answers(ItemList))
async def list_input_items(
    id: str,
    request: Request,
    limit: int = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the input of a stored response, with the conversation before it."""
    items: list[dict[str, Any]] = msgspec.json.decode((await _find(request, id)).items)
    if not 1 <= limit <= 100:
        raise InvalidRequestError(f"limit must be from 1 to 100, not {limit}.", param="limit")
    if order == "desc":
        items.reverse()
    if after is not None:
        known = [item["id"] for item in items]
        if after not in known:
            raise InvalidRequestError(f"No item has the id {after[:128]!r}.", param="after")
        items = items[known.index(after) + 1 :]
    shown = items[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return _json(ItemList(shown, first, last, len(items) > limit))


def _check_background(body: ResponsesRequest, *, is_stored: bool) -> None:
    """Raises InvalidRequestError for options that exclude an answer in the background."""
    if body.stream:
        raise InvalidRequestError(
            "A response in the background is not streamed: GET /v1/responses/ID returns it. Leave "
            "stream or background out.",
            param="background",
        )
    if not is_stored:
        raise InvalidRequestError(
            "A response in the background must be stored: store must not be false, nor "
            "--response-store 0.",
            param="background",
        )


async def _context(
    body: ResponsesRequest, request: Request
) -> tuple[list[dict[str, Any]], Sequence[Item]]:
    """Return the conversation before the input, as JSON and parsed.

    Raises InvalidRequestError if the earlier response is not stored, or not finished."""
    if (id := body.previous_response_id) is None:
        return [], ()
    server = server_of(request)
    record = await server.responses.find(request.state.key, id)
    if record is None:
        raise InvalidRequestError(
            f"Previous response with id {id[:128]!r} not found. {_bounds(server)} Send the "
            "complete conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if record.engine_id:
        raise InvalidRequestError(
            f"The response {id[:128]!r} is still in progress.", param="previous_response_id"
        )
    context: list[dict[str, Any]] = msgspec.json.decode(record.items)
    context += msgspec.json.decode(record.response)["output"]
    for part in (part for item in context for part in item.get("content") or ()):
        part.pop("logprobs", None)
    return context, read_items(context)


async def _start_in_background(
    body: ResponsesRequest,
    answer: ChatAnswer,
    record: StoredResponse,
    request: Request,
    model: str,
) -> Response:
    """Let the answer run on its own. Returns the response without its output."""
    server: Server = server_of(request)

    async def keep(response: dict[str, Any]) -> bool:
        record.response, record.engine_id = msgspec.json.encode(response), ""
        await server.responses.update(record)
        return True

    async def finish() -> None:
        try:
            await builder.collect()
        except Exception as error:
            if not isinstance(error, ToolkitError):
                logger.exception("internal error in a response in the background")
            await keep(builder.failed(error))
        finally:
            answer.group.close()

    builder = ResponseBuilder(body, answer, request.state.request_id, model, keep)
    begun = builder.begun()
    record.response = msgspec.json.encode(begun)
    record.engine_id = answer.group.streams[0].state.id
    try:
        if not await server.responses.add(record):
            raise InvalidRequestError(
                "The conversation is too large to be stored, so background must be left out.",
                param="background",
            )
    except BaseException:
        answer.group.close()
        raise
    server.background.start(finish(), request.state.client)
    return _json(begun)


async def _find(request: Request, id: str) -> StoredResponse:
    """Return a stored response of this request's API key. Raises NoSuchResponseError."""
    server = server_of(request)
    record = await server.responses.find(request.state.key, id)
    if record is None:
        raise _missing(server, id)
    return record


def _missing(server: Server, id: str) -> NoSuchResponseError:
    return NoSuchResponseError(
        f"Response with id {id[:128]!r} not found. {_bounds(server)}", code="response_not_found"
    )


def _bounds(server: Server) -> str:
    number = server.config.response_store
    if not number:
        return "This server stores no responses (--response-store 0)."
    return (
        f"This server keeps the newest {number:,} (--response-store) in memory, of each API key "
        "for itself."
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
