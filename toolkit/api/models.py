"""GET /v1/models, /version, /metrics."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit import __version__
from toolkit.api.docs import answers
from toolkit.api.replies import ModelCard, ModelList
from toolkit.api.service import Service
from toolkit.metrics import CONTENT_TYPE

router = APIRouter()


class Version(msgspec.Struct):
    version: str


@router.get("/v1/models", response_model=None, responses=answers(ModelList), tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The served model."""
    service: Service = request.app.state.service
    return Response(msgspec.json.encode(ModelList([_card(service)])), media_type="application/json")


@router.get("/v1/models/{model:path}", response_model=None, responses=answers(ModelCard), tags=["OpenAI"])
async def one_model(model: str, request: Request) -> Response:
    """One model by name."""
    service: Service = request.app.state.service
    service.check_model(model)
    return Response(msgspec.json.encode(_card(service)), media_type="application/json")


def _card(service: Service) -> ModelCard:
    info = service.engine.info
    return ModelCard(service.model_name, service.created, info.max_model_len, info.tasks)


@router.get("/version", response_model=None, responses=answers(Version), tags=["operation"])
async def version() -> Response:
    """tk's version."""
    return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")


@router.get("/metrics", response_model=None, tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service: Service = request.app.state.service
    return Response(await service.metrics(), media_type=CONTENT_TYPE)
