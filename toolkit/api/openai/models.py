"""GET /v1/models."""

import uuid

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.openapi import answers
from toolkit.api.http.server import ServedModel, Server, server_of
from toolkit.api.openai.replies import ModelCard, ModelList, ModelPermission

router = APIRouter()


@router.get("/v1/models", response_model=None, responses=answers(ModelList), tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """List the served model, once for each of its names, and its adapters."""
    server = server_of(request)
    cards = [_card(server, model, name) for model in server.models for name in model.names]
    names = {card.id for card in cards}
    cards += [
        _card(server, model, name, folder)
        for model in server.models
        for name, folder in model.engine.adapters.folders.items()
        if name not in names
    ]
    return Response(msgspec.json.encode(ModelList(cards)), media_type="application/json")


@router.get(
    "/v1/models/{model:path}", response_model=None, responses=answers(ModelCard), tags=["OpenAI"]
)
async def get_model(model: str, request: Request) -> Response:
    """Describe one model by name."""
    if not model:  # /v1/models/
        return await list_models(request)
    found = server_of(request).find(model)
    adapter = None if found.adapter is None else found.adapter.folder
    name = model if model in found.model.names else found.name
    card = _card(found.server, found.model, name, adapter)
    return Response(msgspec.json.encode(card), media_type="application/json")


def _card(server: Server, model: ServedModel, name: str, adapter: str | None = None) -> ModelCard:
    """Return a card of a model, or of an adapter in a folder."""
    info, config = model.engine.info, model.engine.config
    tokenizer = model.engine.tokenizer
    can_chat = info.generates and tokenizer is not None and tokenizer.has_chat_template
    tasks = info.tasks if adapter is None else ["generate"]
    modalities = ["text"]
    if info.sight is not None:
        modalities.append("image")
    if info.hearing is not None:
        tasks = ["transcription"]  # each prompt needs sound
        modalities.append("audio")
    elif model.engine.inputs.transcribes and adapter is None:
        tasks = [*tasks, "transcription"]
    if info.sound is not None:
        modalities.append("audio")
    folder = config.model.model if adapter is None else adapter
    return ModelCard(
        name,
        server.created,
        info.max_model_len,
        [*tasks, *["chat"] * can_chat],
        modalities,
        root=str(folder or model.name),
        permission=[
            ModelPermission(f"modelperm-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}", server.created)
        ],
        parent=None if adapter is None else model.name,
    )
