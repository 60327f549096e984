"""GET /v1/models."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.openapi import answers
from toolkit.api.http.service import Service
from toolkit.api.openai.replies import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models", response_model=None, responses=answers(ModelList), tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """List the served model."""
    service: Service = request.app.state.service
    return Response(msgspec.json.encode(ModelList([_card(service)])), media_type="application/json")


@router.get(
    "/v1/models/{model:path}", response_model=None, responses=answers(ModelCard), tags=["OpenAI"]
)
async def get_model(model: str, request: Request) -> Response:
    """Describe one model by name."""
    service: Service = request.app.state.service
    service.check_model(model)
    return Response(msgspec.json.encode(_card(service)), media_type="application/json")


def _card(service: Service) -> ModelCard:
    info = service.engine.info
    return ModelCard(service.model_name, service.created, info.max_model_len, info.tasks)
