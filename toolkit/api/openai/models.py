"""GET /v1/models."""

import uuid

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.openapi import answers
from toolkit.api.http.service import Service
from toolkit.api.openai.replies import ModelCard, ModelList, ModelPermission

router = APIRouter()


@router.get("/v1/models", response_model=None, responses=answers(ModelList), tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """List the served model, once for each of its names."""
    service: Service = request.app.state.service
    cards = ModelList([_card(service, name) for name in service.model_names])
    return Response(msgspec.json.encode(cards), media_type="application/json")


@router.get(
    "/v1/models/{model:path}", response_model=None, responses=answers(ModelCard), tags=["OpenAI"]
)
async def get_model(model: str, request: Request) -> Response:
    """Describe one model by name."""
    if not model:  # /v1/models/
        return await list_models(request)
    service: Service = request.app.state.service
    service.check_model(model)
    name = model if model in service.model_names else service.model_name
    return Response(msgspec.json.encode(_card(service, name)), media_type="application/json")


def _card(service: Service, name: str) -> ModelCard:
    info = service.engine.info
    return ModelCard(
        name,
        service.created,
        info.max_model_len,
        info.tasks,
        root=service.engine.config.model.model or service.model_name,
        permission=[
            ModelPermission(
                f"modelperm-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}", service.created
            )
        ],
    )
