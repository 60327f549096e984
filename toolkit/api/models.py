"""GET /v1/models, /health, /version, /metrics."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit import __version__
from toolkit.api.schemas import ModelCard, ModelList
from toolkit.api.service import Service
from toolkit.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/v1/models", response_model=None, tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The served model."""
    service: Service = request.app.state.service
    card = ModelCard(service.model_name, service.created, service.engine.info.max_model_len)
    return Response(msgspec.json.encode(ModelList([card])), media_type="application/json")


@router.get("/v1/models/{model:path}", response_model=None, tags=["OpenAI"])
async def one_model(model: str, request: Request) -> Response:
    """One model by name."""
    service: Service = request.app.state.service
    service.check_model(model)
    card = ModelCard(service.model_name, service.created, service.engine.info.max_model_len)
    return Response(msgspec.json.encode(card), media_type="application/json")


@router.get("/health", response_model=None, tags=["operation"])
async def health(request: Request) -> Response:
    """200 while the engine runs; 503 when it has died, with the cause."""
    service: Service = request.app.state.service
    if service.engine.dead is not None:
        raise service.engine.dead
    return Response()


@router.get("/version", response_model=None, tags=["operation"])
async def version() -> Response:
    """tk's version."""
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


@router.get("/metrics", response_model=None, tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service: Service = request.app.state.service
    return Response(await service.metrics(), media_type=CONTENT_TYPE)
