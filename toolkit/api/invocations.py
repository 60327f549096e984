"""POST /invocations: Amazon SageMaker's only endpoint, for all requests."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from toolkit.api.http.body_fields import RequestBody, Route, parse_body
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import server_of
from toolkit.api.openai.chat import chat_completions
from toolkit.api.openai.completions import completions
from toolkit.api.openai.schemas import ChatRequest, CompletionRequest
from toolkit.api.pooling.embeddings import EmbeddingRequest, embeddings
from toolkit.api.pooling.pooling import ClassificationRequest, classify
from toolkit.api.pooling.score import RerankRequest, ScoreRequest, rerank, score
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["operation"], route_class=Route)


class Invocation(RequestBody):
    """POST /invocations: the body of another endpoint."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"example": {"prompt": "The sea is", "max_tokens": 8}}
    )


Answer = Callable[[Any, Request], Awaitable[Response]]
_KINDS: dict[str, tuple[type[Any], Answer]] = {
    "prompt": (CompletionRequest, completions),
    "text_1": (ScoreRequest, score),
    "query": (RerankRequest, rerank),
}
"""Bodies and endpoints, by a field that no other body has."""


@router.post(
    "/invocations", response_model=None, responses=answers("Reply of the endpoint", stream=True)
)
@access(Access.MODEL_WORK)
async def invocations(body: Invocation, request: Request) -> Response:
    """Answer a chat, completion, embedding, classification, score or ranking.

    The fields, and the model's task, say which."""
    given = body.model_extra or {}
    kind, endpoint = _kind_of(given, request)
    return await endpoint(parse_body(kind, given), request)


def _kind_of(given: dict[str, Any], request: Request) -> tuple[type[Any], Answer]:
    """Raises InvalidRequestError for a body of no endpoint, and errors of `Server.find`."""
    if found := next((kind for name, kind in _KINDS.items() if name in given), None):
        return found
    name = given.get("model")
    info = server_of(request).find(name if isinstance(name, str) else None).engine.info
    if "messages" in given and info.generates:
        return ChatRequest, chat_completions
    if "input" in given or "messages" in given:
        if info.pooling is not None and info.pooling.task != "embed":
            return ClassificationRequest, classify
        return EmbeddingRequest, embeddings
    raise InvalidRequestError(
        "The body is of no request that this server answers: it needs messages, prompt, input, "
        "text_1 and text_2, or query and documents."
    )
