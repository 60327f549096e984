"""POST /v1/responses: OpenAI's Responses API, for text, pictures and functions.

Nothing is stored."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import target_of
from toolkit.api.http.streaming import EventStream, while_connected
from toolkit.api.openai.conversation import start_answer
from toolkit.api.openai.response_events import ResponseBuilder
from toolkit.api.openai.response_request import ResponsesRequest

router = APIRouter(tags=["OpenAI"], route_class=Route)


@router.post(
    "/v1/responses", response_model=None, responses=answers("OpenAI's Response", stream=True)
)
@access(Access.MODEL_WORK)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input: a text, or the complete conversation so far."""
    target = target_of(request, body)
    name = request.state.request_id
    asked = body.to_conversation(target.engine.default_sampling)
    answer = await start_answer(target, asked, request, f"resp_{name}")
    builder = ResponseBuilder(body, answer, name, target.name)
    if body.stream:
        return EventStream(
            builder.events(),
            answer.group.close,
            target.server.config.sse_keep_alive,
            builder.error_event,
        )
    try:
        done = await while_connected(request, builder.collect())
    finally:
        answer.group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")
