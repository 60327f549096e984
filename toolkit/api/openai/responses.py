"""POST /v1/responses: OpenAI's newer interface, for text and functions. Nothing is stored."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.service import service_for
from toolkit.api.http.streaming import EventStream, while_connected
from toolkit.api.openai.conversation import begin, named_as
from toolkit.api.openai.response_events import Answer
from toolkit.api.openai.response_request import ResponsesRequest

router = APIRouter(tags=["OpenAI"], route_class=Route)

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What a chat's parameters are called here."""


@router.post(
    "/v1/responses", response_model=None, responses=answers("OpenAI's Response", stream=True)
)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answers an input, or goes on with a conversation, which is sent whole."""
    service = service_for(request, body)
    name = request.state.request_id
    chat = body.chat()
    with named_as(_NAMES):
        talk = await begin(service, chat, f"resp_{name}")
    answer = Answer(body, talk, name, service.model_name)
    if body.stream:
        return EventStream(
            answer.events(), talk.group.close, service.config.sse_keep_alive, answer.error_event
        )
    try:
        done = await while_connected(request, answer.collect())
    finally:
        talk.group.close()
    return Response(msgspec.json.encode(done), media_type="application/json")
