"""POST /v1/embeddings."""

import base64
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from toolkit.api.http.body_fields import Prompts, RequestBody, Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import target_of
from toolkit.api.openai.schemas import Int
from toolkit.api.pooling.inputs import (
    MAX_INPUTS,
    TRUNCATE_DESCRIPTION,
    PooledUsage,
    PoolingJob,
)
from toolkit.engine.front.pooled_prompts import Vector
from toolkit.errors import InvalidRequestError

CHUNK_BYTES = 2**16
"""The reply is sent in chunks: the text of thousands of vectors is never in memory at once."""

router = APIRouter(tags=["OpenAI"], route_class=Route)


class EmbeddingRequest(RequestBody):
    """POST /v1/embeddings."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"example": {"input": ["The sea is calm.", "A storm is coming."]}},
    )

    model: str | None = None
    input: Prompts = Field(description="A text, token ids, or up to 2048 of either")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the numbers as little-endian float32"
    )
    dimensions: int | None = Field(
        None,
        description="Numbers to keep of each embedding; needs a model trained for it (Matryoshka)",
    )
    truncate_prompt_tokens: Int | None = Field(None, description=TRUNCATE_DESCRIPTION)
    user: str | None = Field(None, description="Accepted for compatibility; not stored")
    priority: Int = Field(
        0, description="With --scheduling-policy priority, the lowest value runs first"
    )

    def inputs(self) -> list[str | list[int]]:
        """Raises InvalidRequestError for no input and for too many."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise InvalidRequestError("input is empty.", param="input")
        if isinstance(self.input[0], int):
            return [self.input]
        if len(self.input) > MAX_INPUTS:
            raise InvalidRequestError(
                f"A request takes at most {MAX_INPUTS} inputs, not {len(self.input)}.",
                param="input",
            )
        return list(self.input)


class EmbeddingItem(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"]


class EmbeddingList(msgspec.Struct):
    """Reply, described for the API documentation: `_body` writes it in chunks."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: PooledUsage


@router.post("/v1/embeddings", response_model=None, responses=answers(EmbeddingList))
@access(Access.MODEL_WORK)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embed texts: each becomes a vector, and similar texts get similar vectors."""
    target = target_of(request, body)
    job = PoolingJob(target, request, "embd", body.priority)
    size = job.processor.embedding_size(body.dimensions)
    inputs = await job.prepare(body.inputs(), body.truncate_prompt_tokens)
    vectors = [job.processor.truncate(vector, size) for vector in await job.run(inputs)]
    tail = {"model": target.name, "usage": PooledUsage.of(inputs)}
    return StreamingResponse(
        _body(vectors, body.encoding_format, tail), media_type="application/json"
    )


async def _body(
    vectors: list[Vector], encoding_format: str, tail: dict[str, object]
) -> AsyncGenerator[bytes, None]:
    chunk = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        comma = b"," if index else b""
        chunk += b'%s{"object":"embedding","index":%d,"embedding":' % (comma, index)
        chunk += _encode(vector, encoding_format) + b"}"
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk) + b"]," + msgspec.json.encode(tail)[1:]


def _encode(vector: Vector, encoding_format: str) -> bytes:
    if encoding_format == "base64":
        return b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
