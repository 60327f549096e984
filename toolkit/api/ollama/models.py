"""Ollama's routes about models: /api/tags, /api/ps, /api/show, /api/version, and those refused."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from toolkit.api.http.body_fields import JsonRoute, RequestBody
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import ServedModel, Server, Target, server_of, target_of
from toolkit.api.ollama.replies import (
    ListedModel,
    ListedModels,
    ModelDetails,
    OllamaVersion,
    PullStatus,
    RunningModel,
    RunningModels,
    ShownModel,
)
from toolkit.api.ollama.requests import OllamaRequest
from toolkit.config.engine import LATEST
from toolkit.errors import InvalidRequestError, ModelNotFoundError
from toolkit.units import count

router = APIRouter(tags=["Ollama"], route_class=JsonRoute)

VERSION = "0.12.6"
"""Version of Ollama whose interface this is. Clients compare it with the one that they need."""
NEVER = datetime(2999, 12, 31, tzinfo=UTC)  # when the model is unloaded


class ShowRequest(RequestBody):
    """POST /api/show and /api/pull."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"example": {"verbose": False}})

    model: str | None = Field(None, description="May be left out if there is one model")
    name: str | None = Field(None, description="Older name of model")
    verbose: Any = Field(None, description="Not read")


def find_target(request: Request, body: OllamaRequest | ShowRequest) -> Target:
    """Return what a request names as its model, with or without the tag `:latest`.

    Raises like `target_of`."""
    body.model = _served_name(server_of(request), body.model)
    return target_of(request, body)


def _served_name(server: Server, name: str | None) -> str | None:
    """Return a model's name as the server knows it; an unknown name as it is."""
    if not name:
        return name
    for known in (name, name.removesuffix(LATEST), name + LATEST):
        with suppress(ModelNotFoundError):
            server.find(known)
            return known
    return name


@router.get("/api/tags", response_model=None, responses=answers(ListedModels))
async def tags(request: Request) -> Response:
    """List the served models and adapters, each name once."""
    server = server_of(request)
    models = [ListedModel(**_fields(one), modified_at=_started(server)) for one in _names(server)]
    return _json(ListedModels(models))


@router.get("/api/ps", response_model=None, responses=answers(RunningModels))
async def running(request: Request) -> Response:
    """List the served models and adapters: all are loaded."""
    models = []
    for one in _names(server_of(request)):
        fields, info = _fields(one), one.model.engine.info
        on_gpu = 0 if info.device.startswith("cpu") else fields["size"]
        models.append(
            RunningModel(
                **fields, expires_at=NEVER, size_vram=on_gpu, context_length=info.max_model_len
            )
        )
    return _json(RunningModels(models))


@router.post("/api/show", response_model=None, responses=answers(ShownModel))
@access(Access.KEY)
async def show(body: ShowRequest, request: Request) -> Response:
    """Describe a model: its details, chat template, sampling defaults and capabilities."""
    body.model = body.model or body.name
    target = find_target(request, body)
    engine = target.engine
    details = _details(target.model, "" if target.adapter is None else target.model.name)
    family, tokenizer = details.family, engine.tokenizer
    shown = ShownModel(
        modelfile=f"FROM {target.name}\n",
        parameters="\n".join(
            f"{_PARAMETERS.get(name, name)} {value:g}"
            for name, value in engine.default_sampling.items()
        ),
        template="" if tokenizer is None else tokenizer.chat_template_text,
        details=details,
        model_info={
            "general.architecture": family,
            "general.parameter_count": _num_parameters(target.model),
            f"{family}.context_length": engine.info.max_model_len,
            f"{family}.vocab_size": engine.info.vocab_size,
        },
        capabilities=_capabilities(target),
        modified_at=_started(target.server),
    )
    if (pooling := engine.info.pooling) is not None and pooling.task == "embed":
        shown.model_info[f"{family}.embedding_length"] = pooling.size
    return _json(shown)


_PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # names of sampling defaults that differ


@router.get("/api/version", response_model=None, responses=answers(OllamaVersion))
async def version() -> Response:
    """Return the version of Ollama whose interface this is."""
    return _json(OllamaVersion(VERSION))


@access(Access.KEY)
async def change_models(request: Request) -> Response:
    """Refuse to change the models."""
    raise InvalidRequestError(
        f"{request.url.path} is not supported: the model is chosen when the server starts "
        f"(tk serve MODEL). Served: {server_of(request).describe_names()}."
    )


@router.post("/api/pull", response_model=None, responses=answers(PullStatus))
@access(Access.KEY)
async def pull(body: ShowRequest, request: Request) -> Response:
    """Report success for a served model, which clients may pull before they use it."""
    body.model = body.model or body.name
    try:
        find_target(request, body)
    except ModelNotFoundError:
        return await change_models(request)
    return _json(PullStatus())


for _path in ("/api/push", "/api/create", "/api/copy"):
    router.add_api_route(_path, change_models, methods=["POST"], include_in_schema=False)
router.add_api_route("/api/delete", change_models, methods=["DELETE"], include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _Named:
    """A name that requests can use."""

    name: str
    model: ServedModel
    folder: str | None = None  # of an adapter


def _names(server: Server) -> list[_Named]:
    """Return the names of models and adapters, each once."""
    found = {name: _Named(name, model) for model in server.models for name in model.names}
    for model in server.models:
        for name, folder in model.engine.adapters.folders.items():
            found.setdefault(name, _Named(name, model, folder))
    return list(found.values())


def _fields(one: _Named) -> dict[str, Any]:
    """Return the fields of an OllamaModel. Its name has a tag, as all names of Ollama."""
    name = one.name if ":" in one.name else one.name + LATEST
    root = one.folder or one.model.engine.config.model.model or one.model.name
    info = one.model.engine.info
    return {
        "name": name,
        "model": name,
        "digest": hashlib.sha256(f"{one.name}\n{root}".encode(errors="replace")).hexdigest(),
        "size": info.weight_bytes * info.world_size,
        "details": _details(one.model, "" if one.folder is None else one.model.name),
    }


def _details(model: ServedModel, parent: str = "") -> ModelDetails:
    engine = model.engine
    family, gguf_type = engine.inputs.model_type, engine.inputs.gguf_type
    return ModelDetails(
        format="safetensors" if gguf_type is None else "gguf",
        family=family,
        families=[family],
        parameter_size=count(_num_parameters(model)),
        quantization_level=gguf_type or engine.info.weight_type,
        parent_model=parent,
    )


def _num_parameters(model: ServedModel) -> int:
    info = model.engine.info
    return info.model_parameters or info.num_parameters


def _capabilities(target: Target) -> list[str]:
    """Return the capabilities of a model, in Ollama's words."""
    info, tokenizer = target.engine.info, target.engine.tokenizer
    template = "" if tokenizer is None else tokenizer.chat_template_text
    parsers = target.server.plugins.parsers
    is_harmony = parsers.harmony_for(template) is not None
    is_parsed = parsers.tool_format_for(template) is not None
    has_tools = is_harmony or bool(template and is_parsed and parsers.shows_tools(template))
    found = {
        "completion": info.generates,
        "vision": info.sight is not None,
        "tools": info.generates and has_tools,
        "thinking": info.generates and (is_harmony or parsers.reasoning_format is not None),
        "embedding": info.pooling is not None and info.pooling.task == "embed",
    }
    return [name for name, has in found.items() if has]


def _started(server: Server) -> datetime:
    return datetime.fromtimestamp(server.created, UTC)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
