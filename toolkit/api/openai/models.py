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
    """List the served model, once for each of its names, and its adapters."""
    service: Service = request.app.state.service
    names = (*service.model_names, *service.engine.info.adapters)
    cards = ModelList([_card(service, name) for name in names])
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
    adapters = service.engine.info.adapters
    name = model if model in (*service.model_names, *adapters) else service.model_name
    return Response(msgspec.json.encode(_card(service, name)), media_type="application/json")


def _card(service: Service, name: str) -> ModelCard:
    info, config = service.engine.info, service.engine.config
    is_adapter = name not in service.model_names
    folder = config.lora.adapters[name] if is_adapter else config.model.model
    return ModelCard(
        name,
        service.created,
        info.max_model_len,
        ["generate"] if is_adapter else info.tasks,
        root=str(folder or service.model_name),
        permission=[
            ModelPermission(
                f"modelperm-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}", service.created
            )
        ],
        parent=service.model_name if is_adapter else None,
    )
