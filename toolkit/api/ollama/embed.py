"""POST /api/embed and /api/embeddings: Ollama's embeddings."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, StrictBool
from starlette.responses import Response

from toolkit.api.http.body_fields import BY_KIND, FAIL_FAST, LIST, TEXT, JsonRoute, Text
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.ollama.models import find_target
from toolkit.api.ollama.replies import OllamaEmbedding, OllamaEmbeddings
from toolkit.api.ollama.requests import OllamaRequest
from toolkit.api.pooling.inputs import MAX_INPUTS, PooledUsage, PoolingJob
from toolkit.engine.front.pooled_prompts import Vector
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["Ollama"], route_class=JsonRoute)
_CUT = -1  # keep as many tokens as the model takes


class OllamaEmbedRequest(OllamaRequest):
    """POST /api/embed."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"example": {"input": ["The sea is calm.", "A storm is coming."]}},
    )

    input: Annotated[Annotated[Text, TEXT] | Annotated[list[Text], FAIL_FAST, LIST], BY_KIND] = (
        Field("", description="A text, or up to 2048. Without one there are no embeddings")
    )
    truncate: StrictBool = Field(
        True, description="Cut texts that are too long; false: refuse them"
    )
    dimensions: int | None = Field(
        None,
        description="Numbers to keep of each embedding; needs a model trained for it (Matryoshka)",
    )


class OllamaEmbeddingRequest(OllamaRequest):
    """POST /api/embeddings."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"example": {"prompt": "The sea is calm."}}
    )

    prompt: Text = ""


@router.post("/api/embed", response_model=None, responses=answers(OllamaEmbeddings))
@access(Access.MODEL_WORK)
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Embed texts: each becomes a vector, and similar texts get similar vectors."""
    started = time.monotonic()
    texts = _texts(body.input) if isinstance(body.input, str) else body.input
    truncate = _CUT if body.truncate else None
    name, vectors, usage = await _embed(body, request, texts, truncate, body.dimensions)
    return _json(
        {
            "model": name,
            "embeddings": vectors,
            "total_duration": max(1, round(1e9 * (time.monotonic() - started))),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
        }
    )


@router.post("/api/embeddings", response_model=None, responses=answers(OllamaEmbedding))
@access(Access.MODEL_WORK)
async def embeddings(body: OllamaEmbeddingRequest, request: Request) -> Response:
    """Embed a text. /api/embed has replaced this route."""
    _, vectors, _ = await _embed(body, request, _texts(body.prompt), _CUT)
    return _json({"embedding": vectors[0] if vectors else []})


def _texts(text: str) -> list[str]:
    """Return a list of the text. As in Ollama, an empty one asks for nothing."""
    return [text] if text else []


async def _embed(
    body: OllamaRequest,
    request: Request,
    texts: Sequence[str],
    truncate: int | None,
    dimensions: int | None = None,
) -> tuple[str, list[Vector], PooledUsage]:
    """Return the model's name, a vector for each text, and the tokens of all.

    Raises InvalidRequestError for too many texts, and for a model without embeddings."""
    if len(texts) > MAX_INPUTS:
        raise InvalidRequestError(
            f"A request takes at most {MAX_INPUTS} texts, not {len(texts)}.", param="input"
        )
    target = find_target(request, body)
    job = PoolingJob(target, request, "ollama", 0)
    size = job.processor.embedding_size(dimensions)
    inputs = await job.prepare(texts, truncate)
    vectors = [job.processor.truncate(vector, size) for vector in await job.run(inputs)]
    return target.name, vectors, PooledUsage.of(inputs)


def _json(body: dict[str, Any]) -> Response:
    text = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(text, media_type="application/json")
