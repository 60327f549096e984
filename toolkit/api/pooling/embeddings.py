"""POST /v1/embeddings."""

from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from toolkit.api.http.body_fields import Route
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.pooling.inputs import PooledRequest, PooledUsage, PoolingJob, encode_base64
from toolkit.engine.front.pooled_prompts import Vector

CHUNK_BYTES = 2**16
"""The reply is sent in chunks: the text of thousands of vectors is never in memory at once."""

router = APIRouter(tags=["OpenAI"], route_class=Route)


class EmbeddingRequest(PooledRequest):
    """POST /v1/embeddings."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"example": {"input": ["The sea is calm.", "A storm is coming."]}},
    )

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the numbers as little-endian float32"
    )
    dimensions: int | None = Field(
        None,
        description="Numbers to keep of each embedding; needs a model trained for it (Matryoshka)",
    )


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
    job = PoolingJob.of(body, request, "embd")
    size = job.processor.embedding_size(body.dimensions)
    inputs = await job.prepare_inputs(body)
    vectors = [job.processor.truncate(vector, size) for vector in await job.run(inputs)]
    tail = {"model": job.target.name, "usage": PooledUsage.of(inputs)}
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
        return b'"' + encode_base64(vector).encode() + b'"'
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
