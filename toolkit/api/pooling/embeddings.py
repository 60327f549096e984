"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from toolkit.api.http.body_fields import Prompts, Route, WholeBody
from toolkit.api.http.openapi import answers
from toolkit.api.http.service import service_for
from toolkit.api.openai.schemas import Int
from toolkit.api.pooling.inputs import MAX_INPUTS, PooledUsage, Pooling
from toolkit.engine.pooled_prompts import Vector
from toolkit.errors import InvalidRequestError

PIECE = 2**16
"""Bytes of an answer that are sent at once: thousands of vectors are never text all together."""

router = APIRouter(tags=["OpenAI"], route_class=Route)


class EmbeddingRequest(WholeBody):
    """POST /v1/embeddings."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"example": {"input": ["The sea is calm.", "A storm is coming."]}},
    )

    model: str | None = None
    input: Prompts = Field(description="A text, token ids, or several of either, at most 2048")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the numbers as little-endian float32"
    )
    dimensions: int | None = Field(
        None,
        description="Numbers that are kept of each embedding, of a model that was made to be cut",
    )
    truncate_prompt_tokens: Int | None = Field(
        None,
        description="Tokens that are kept of each text; -1: as many as the model takes. Without it, a longer one is an error",
    )
    user: str | None = Field(None, description="Taken for compatibility; kept nowhere")
    priority: Int = Field(
        0, description="With --scheduling-policy priority: the smaller runs first"
    )

    def inputs(self) -> list[str | list[int]]:
        """Raises InvalidRequestError for an empty list, or one input too many."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise InvalidRequestError("input is empty.", param="input")
        if isinstance(self.input[0], int):
            return [self.input]
        if len(self.input) > MAX_INPUTS:
            raise InvalidRequestError(
                f"A request takes at most {MAX_INPUTS} inputs; it got {len(self.input)}.",
                param="input",
            )
        return list(self.input)


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"]


class EmbeddingList(msgspec.Struct):
    """The answer, as it is written piece by piece."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


@router.post("/v1/embeddings", response_model=None, responses=answers(EmbeddingList))
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text: texts that mean the like have vectors that point the same way."""
    service = service_for(request, body)
    pooling = Pooling(service, request, "embd", body.priority)
    size = pooling.processor.size(body.dimensions)
    inputs = await pooling.prepare(body.inputs(), body.truncate_prompt_tokens)
    vectors = [pooling.processor.cut(vector, size) for vector in await pooling.run(inputs)]
    tail = {"model": service.model_name, "usage": PooledUsage.of(inputs)}
    return StreamingResponse(
        _answer(vectors, body.encoding_format, tail), media_type="application/json"
    )


async def _answer(
    vectors: list[Vector], encoding_format: str, tail: dict[str, object]
) -> AsyncGenerator[bytes, None]:
    piece = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        piece += b'%s{"object":"embedding","index":%d,"embedding":' % (
            b"," if index else b"",
            index,
        )
        piece += _encoded(vector, encoding_format) + b"}"
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece) + b"]," + msgspec.json.encode(tail)[1:]


def _encoded(vector: Vector, encoding_format: str) -> bytes:
    if encoding_format == "base64":
        return b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
