"""POST /pooling and /classify: the vector of a text, whatever the model computes, and its labels.

The requests and replies are vLLM's."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.client_fields import REFUSED_IN_POOLING
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.pooling.inputs import PooledRequest, PooledUsage, PoolingJob, encode_base64

router = APIRouter(tags=["scoring"], route_class=Route)

_EXAMPLE: Any = {"example": {"input": ["The sea is calm.", "A storm is coming."]}}


class PoolingRequest(PooledRequest):
    """POST /pooling."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_EXAMPLE)
    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_POOLING

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the numbers as little-endian float32"
    )


class ClassificationRequest(PooledRequest):
    """POST /classify."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_EXAMPLE)


class PooledItem(msgspec.Struct):
    index: int
    data: list[float] | str
    object: str = "pooling"


class PoolingResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PooledItem]
    usage: PooledUsage
    object: str = "list"


class ClassifiedItem(msgspec.Struct):
    index: int
    label: str  # the likeliest
    probs: list[float]  # of all labels, in the order of config.json
    num_classes: int


class ClassificationResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassifiedItem]
    usage: PooledUsage
    object: str = "list"


@router.post("/pooling", response_model=None, responses=answers(PoolingResponse))
@access(Access.MODEL_WORK)
async def pooling(body: PoolingRequest, request: Request) -> Response:
    """Return the vector of each text: its embedding, or its scores."""
    job = PoolingJob.of(body, request, "pool")
    job.processor.require_task("embed", "score", "classify")
    inputs = await job.prepare_inputs(body)
    data = [
        PooledItem(
            index, vector.tolist() if body.encoding_format == "float" else encode_base64(vector)
        )
        for index, vector in enumerate(await job.run(inputs))
    ]
    usage = PooledUsage.of(inputs)
    return _json(PoolingResponse(job.id, int(time.time()), job.target.name, data, usage))


@router.post("/classify", response_model=None, responses=answers(ClassificationResponse))
@access(Access.MODEL_WORK)
async def classify(body: ClassificationRequest, request: Request) -> Response:
    """Classify texts: each gets the probabilities of the model's labels."""
    job = PoolingJob.of(body, request, "classify")
    labels = job.processor.require_task("score", "classify").labels
    inputs = await job.prepare_inputs(body)
    data = [
        ClassifiedItem(index, labels[int(vector.argmax())], vector.tolist(), len(labels))
        for index, vector in enumerate(await job.run(inputs))
    ]
    usage = PooledUsage.of(inputs)
    return _json(ClassificationResponse(job.id, int(time.time()), job.target.name, data, usage))


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
