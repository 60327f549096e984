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
    cards = [_card(service, name) for name in service.model_names]
    folders = service.engine.adapters.folders
    cards += [
        _card(service, name, folder)
        for name, folder in folders.items()
        if name not in service.model_names
    ]
    return Response(msgspec.json.encode(ModelList(cards)), media_type="application/json")


@router.get(
    "/v1/models/{model:path}", response_model=None, responses=answers(ModelCard), tags=["OpenAI"]
)
async def get_model(model: str, request: Request) -> Response:
    """Describe one model by name."""
    if not model:  # /v1/models/
        return await list_models(request)
    service: Service = request.app.state.service
    adapter = service.check_model(model)
    if adapter is not None:
        card = _card(service, model, adapter.folder)
    else:
        card = _card(service, model if model in service.model_names else service.model_name)
    return Response(msgspec.json.encode(card), media_type="application/json")


def _card(service: Service, name: str, adapter: str | None = None) -> ModelCard:
    """Return a card of the model, or of an adapter in a folder."""
    info, config = service.engine.info, service.engine.config
    tokenizer = service.engine.tokenizer
    can_chat = info.generates and tokenizer is not None and tokenizer.has_chat_template
    folder = config.model.model if adapter is None else adapter
    return ModelCard(
        name,
        service.created,
        info.max_model_len,
        [*(info.tasks if adapter is None else ["generate"]), *["chat"] * can_chat],
        root=str(folder or service.model_name),
        permission=[
            ModelPermission(
                f"modelperm-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}", service.created
            )
        ],
        parent=None if adapter is None else service.model_name,
    )
