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
    names = (*service.model_names, *service.engine.adapters.names)
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
    is_name = model in service.model_names or service.engine.adapters.find(model) is not None
    name = model if is_name else service.model_name
    return Response(msgspec.json.encode(_card(service, name)), media_type="application/json")


def _card(service: Service, name: str) -> ModelCard:
    info, config = service.engine.info, service.engine.config
    adapter = None if name in service.model_names else service.engine.adapters.find(name)
    folder = config.model.model if adapter is None else adapter.folder
    return ModelCard(
        name,
        service.created,
        info.max_model_len,
        info.tasks if adapter is None else ["generate"],
        root=str(folder or service.model_name),
        permission=[
            ModelPermission(
                f"modelperm-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}", service.created
            )
        ],
        parent=None if adapter is None else service.model_name,
    )
