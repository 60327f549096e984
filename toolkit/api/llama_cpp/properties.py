"""llama.cpp's routes about the server, its templates and embeddings, and those refused."""

from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from toolkit.api.admin.health import health
from toolkit.api.http.body_fields import (
    BY_KIND,
    FAIL_FAST,
    LIST,
    TEXT,
    JsonRoute,
    RequestBody,
    Text,
)
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import Target, server_of, target_of
from toolkit.api.llama_cpp.completion import settings_of
from toolkit.api.openai.chat import chat_completions
from toolkit.api.openai.conversation import render_conversation
from toolkit.api.openai.models import list_models
from toolkit.api.openai.schemas import ChatRequest
from toolkit.api.pooling.inputs import MAX_INPUTS, PoolingJob
from toolkit.api.pooling.score import rerank
from toolkit.errors import InvalidParamError, InvalidRequestError, ServerUnavailableError
from toolkit.sampling.params import SamplingParams
from toolkit.version import __version__

router = APIRouter(tags=["llama.cpp"], route_class=JsonRoute)
_LISTED = answers({"type": "array", "items": {"type": "object"}})
_EUCLIDEAN = 2  # value of embd_normalize


class DefaultSettings(msgspec.Struct):
    n_ctx: int
    params: dict[str, Any]  # as generation_settings of /completion


class Modalities(msgspec.Struct):
    vision: bool
    audio: bool = False


class Properties(msgspec.Struct, kw_only=True):
    """Reply of /props."""

    default_generation_settings: DefaultSettings
    total_slots: int  # requests that run at once
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class Slot(msgspec.Struct):
    """Place of a request that runs, or a free one."""

    id: int
    n_ctx: int
    is_processing: bool


class LlamaAdapter(msgspec.Struct):
    id: int
    path: str
    scale: float = 1.0  # requests name an adapter as their model, so its own scale holds


class TemplatedPrompt(msgspec.Struct):
    """Reply of /apply-template."""

    prompt: str


class LlamaEmbeddingRequest(RequestBody):
    """POST /embedding."""

    model_config = ConfigDict(json_schema_extra={"example": {"content": "The sea is calm."}})

    model: str | None = None
    content: Annotated[Annotated[Text, TEXT] | Annotated[list[Text], FAIL_FAST, LIST], BY_KIND] = (
        Field(description=f"A text, or up to {MAX_INPUTS}")
    )
    embd_normalize: int = Field(_EUCLIDEAN, description="Only 2 (length 1) is supported")


@router.get("/props", response_model=None, responses=answers(Properties))
async def properties(request: Request, model: str | None = None) -> Response:
    """Describe the model, and how a completion without options is sampled."""
    target = server_of(request).find(model)
    engine = target.engine
    info, tokenizer = engine.info, engine.tokenizer
    special = {} if tokenizer is None else tokenizer.special_tokens
    params = SamplingParams(**{**engine.default_sampling, "max_tokens": None})
    return _json(
        Properties(
            default_generation_settings=DefaultSettings(info.max_model_len, settings_of(params)),
            total_slots=engine.max_num_running,
            model_alias=target.name,
            model_path=_path(target),
            modalities=Modalities(info.sight is not None, info.sound is not None),
            chat_template="" if tokenizer is None else tokenizer.chat_template_text,
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            build_info=f"tk {__version__}",
        )
    )


@router.get("/slots", response_model=None, responses=_LISTED)
async def slots(
    request: Request, model: str | None = None, fail_on_no_slot: bool = False
) -> Response:
    """List places of requests: those that run, then the free ones."""
    server = server_of(request)
    engine = server.find(model).engine
    found = (await engine.live_requests()).requests
    busy, total = sum(one.state == "running" for one in found), engine.max_num_running
    if fail_on_no_slot and busy >= total:
        raise ServerUnavailableError(f"All {total} slots are processing.")
    return _json([Slot(i, engine.info.max_model_len, i < busy) for i in range(total)])


@router.get("/lora-adapters", response_model=None, responses=_LISTED)
async def adapters(request: Request, model: str | None = None) -> Response:
    """List the adapters, which requests name as their model."""
    folders = server_of(request).find(model).engine.adapters.folders
    return _json([LlamaAdapter(index, str(path)) for index, path in enumerate(folders.values())])


@router.post("/apply-template", response_model=None, responses=answers(TemplatedPrompt))
@access(Access.MODEL_WORK)
async def apply_template(body: ChatRequest, request: Request) -> Response:
    """Return the prompt of a conversation as text, without a BOS that /completion would add."""
    target = target_of(request, body)
    text = await render_conversation(target, body.to_conversation(None))
    tokenizer = target.engine.inputs.require_tokenizer()
    begin = tokenizer.decode(tokenizer.encode("")[:1], skip_special_tokens=False)
    return _json(TemplatedPrompt(text.removeprefix(begin)))


@router.post("/embedding", response_model=None, responses=_LISTED)
@router.post("/embeddings", response_model=None, responses=_LISTED)
@access(Access.MODEL_WORK)
async def embedding(body: LlamaEmbeddingRequest, request: Request) -> Response:
    """Embed texts: each becomes a vector, and similar texts get similar vectors."""
    if body.embd_normalize != _EUCLIDEAN:
        raise InvalidParamError("embd_normalize", f"must be 2; got {body.embd_normalize}.")
    texts = [body.content] if isinstance(body.content, str) else body.content
    if not 0 < len(texts) <= MAX_INPUTS:
        raise InvalidParamError("content", f"must be 1 to {MAX_INPUTS} texts; got {len(texts)}.")
    job = PoolingJob(target_of(request, body), request, "llama", 0)
    job.processor.embedding_size(None)
    vectors = await job.run(await job.prepare(texts, None, "content"))
    found = [{"index": i, "embedding": [vector]} for i, vector in enumerate(vectors)]
    text = orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(text, media_type="application/json")


_REFUSED = {
    "/infill": "the models here do not fill in the middle. Send the prompt with the model's own "
    "tokens for it to /completion",
    "/lora-adapters": "requests name one adapter as model, at its own scale",
    "/props": "flags of tk serve choose the settings, and requests their own",
    "/slots/{id}": "prefixes of prompts are cached in memory, and not saved",
}


@access(Access.KEY)
async def refuse(request: Request) -> Response:
    """Refuse what the server does not have."""
    reason = _REFUSED[request.scope["route"].path]
    raise InvalidRequestError(f"POST {request.url.path} is not supported: {reason}.")


for _refused in _REFUSED:
    router.add_api_route(_refused, refuse, methods=["POST"], include_in_schema=False)
# Clients of llama.cpp may leave /v1 out, or put it before more routes than OpenAI's.
for _alias, _other, _method in (
    ("/models", list_models, "GET"),
    ("/v1/health", health, "GET"),
    ("/chat/completions", chat_completions, "POST"),
    ("/reranking", rerank, "POST"),
    ("/v1/reranking", rerank, "POST"),
):
    router.add_api_route(_alias, _other, methods=[_method], include_in_schema=False)


def _path(target: Target) -> str:
    return str(target.engine.config.model.model or target.model.name)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
