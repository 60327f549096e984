"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

import logging

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, StrictBool
from starlette.responses import Response

from toolkit.api.http.body_fields import RequestBody, Route, Text
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import ServedModel, server_of
from toolkit.errors import InvalidRequestError, ModelNotFoundError, ToolkitError

router = APIRouter(tags=["operation"], route_class=Route)
logger = logging.getLogger(__name__)


class RuntimeLoRAError(ToolkitError):
    """The server does not load adapters while it runs."""

    status = 403
    type = "permission_error"


class LoadRequest(RequestBody):
    """An adapter to serve."""

    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "a", "lora_path": "a"}})

    lora_name: Text
    lora_path: Text
    load_inplace: StrictBool = True
    model: Text | None = Field(None, description="The adapter's model, if there are several")


class UnloadRequest(RequestBody):
    """An adapter to serve no longer."""

    model_config = ConfigDict(json_schema_extra={"example": {"lora_name": "a"}})

    lora_name: Text
    model: Text | None = Field(None, description="The adapter's model, if there are several")


class AdapterChange(msgspec.Struct):
    """A change that was made."""

    id: str
    root: str
    status: str  # loaded, unchanged, or unloaded


@router.post("/v1/load_lora_adapter", response_model=None, responses=answers(AdapterChange))
@access(Access.ADMIN)
async def load(body: LoadRequest, request: Request) -> Response:
    """Read a LoRA adapter into memory and serve it, in place of another revision of that name.

    Requests that run keep the revision that they began with. With several engines or API workers
    all of them serve the adapter or, after an error, what they served before."""
    model = _model(request, body.model)
    name, before = body.lora_name, model.engine.adapters.find(body.lora_name)
    if any(one.has_name(name) for one in server_of(request).models):
        raise InvalidRequestError(
            f"The model itself is called {name!r}. Choose another name.", param="lora_name"
        )
    others = [one for one in server_of(request).models if one is not model]
    if any(one.engine.adapters.find(name) for one in others):
        raise InvalidRequestError(
            f"Another model has an adapter {name!r}. Choose another name.", param="lora_name"
        )
    if before is not None and not body.load_inplace:
        raise InvalidRequestError(
            f"There is an adapter {name!r} ({before.folder}). Unload it, or leave out "
            f"load_inplace=false.",
            param="lora_name",
        )
    try:
        adapter = await model.engine.load_adapter(name, body.lora_path)
    except ToolkitError as error:
        logger.warning("adapter %r: not loaded: %s", name, error.message)
        raise
    status = "unchanged" if adapter == before else "loaded"
    logger.info("adapter %r (%s): %s", name, adapter.folder, status)
    return _answer(AdapterChange(name, adapter.folder, status))


@router.post("/v1/unload_lora_adapter", response_model=None, responses=answers(AdapterChange))
@access(Access.ADMIN)
async def unload(body: UnloadRequest, request: Request) -> Response:
    """Serve a LoRA adapter no longer. Requests that run keep it; then its memory is freed."""
    model = _model(request, body.model)
    adapter = model.engine.unload_adapter(body.lora_name)
    if adapter is None:
        adapters = model.engine.adapters
        message = f"There is no adapter {body.lora_name!r}. Served: {adapters.describe_names()}."
        raise ModelNotFoundError(
            adapters.explain_missing(body.lora_name) or message, param="lora_name"
        )
    logger.info("adapter %r: unloaded", body.lora_name)
    return _answer(AdapterChange(adapter.name, adapter.folder, "unloaded"))


def _model(request: Request, name: str | None) -> ServedModel:
    model = server_of(request).find(name).model
    if not model.engine.config.lora.allow_runtime_lora:
        raise RuntimeLoRAError("Adapters can be changed if tk serve has --allow-runtime-lora.")
    return model


def _answer(value: AdapterChange) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
