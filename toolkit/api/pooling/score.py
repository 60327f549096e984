"""POST /v1/score and /v1/rerank, with the fields of vLLM, and of Jina's and Cohere's rerankers."""

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Discriminator, Field, StrictBool, Tag
from starlette.responses import Response

from toolkit.api.http.body_fields import (
    BY_KIND,
    FAIL_FAST,
    LIST,
    TEXT,
    Body,
    RequestBody,
    Route,
    Text,
)
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import target_of
from toolkit.api.openai.schemas import Int
from toolkit.api.pooling.inputs import (
    MAX_INPUTS,
    TRUNCATE_DESCRIPTION,
    PooledUsage,
    PoolingJob,
)
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["scoring"], route_class=Route)

_TRUNCATE = Field(None, description=TRUNCATE_DESCRIPTION)
_PRIORITY = Field(0, description="With --scheduling-policy priority, the lowest value runs first")


Texts = Annotated[
    Annotated[Text, TEXT] | Annotated[list[Text], FAIL_FAST, LIST],
    BY_KIND,
]


class ScoreRequest(RequestBody):
    """POST /v1/score."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "text_1": "What is the sea like?",
                "text_2": ["The sea is calm.", "Bread is baked."],
            }
        },
    )

    model: str | None = None
    text_1: Texts = Field(description="One text for all of text_2, or one per text")
    text_2: Texts
    truncate_prompt_tokens: Int | None = _TRUNCATE
    priority: Int = _PRIORITY


class RerankDocument(Body):
    text: Text


Document = Annotated[
    Annotated[Text, TEXT] | Annotated[RerankDocument, Tag("(object)")],
    Discriminator(lambda value: TEXT.tag if isinstance(value, str) else "(object)"),
]


class RerankRequest(RequestBody):
    """POST /v1/rerank."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "query": "What is the sea like?",
                "documents": ["Bread is baked.", "The sea is calm."],
                "top_n": 1,
            }
        },
    )

    model: str | None = None
    query: Text
    documents: Annotated[list[Document], FAIL_FAST]
    top_n: Int | None = Field(None, description="Number of best documents to return; default: all")
    return_documents: StrictBool = Field(True, description="Return the text of each document")
    truncate_prompt_tokens: Int | None = _TRUNCATE
    priority: Int = _PRIORITY

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
    object: str = "list"


class RankedDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    usage: PooledUsage


@router.post("/score", response_model=None, responses=answers(ScoreResponse))
@router.post("/v1/score", response_model=None, responses=answers(ScoreResponse))
@access(Access.MODEL_WORK)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts: by a cross-encoder, or by the cosine of their embeddings."""
    target = target_of(request, body)
    job = PoolingJob(target, request, "score", body.priority)
    firsts, seconds = _as_list(body.text_1, "text_1"), _as_list(body.text_2, "text_2")
    names = ("text_1", "text_2")
    comparison = await job.compare(firsts, seconds, body.truncate_prompt_tokens, names)
    scores = comparison.compute_scores(await job.run(comparison.inputs))
    data = [Score(index, value) for index, value in enumerate(scores)]
    usage = PooledUsage.of(comparison.inputs)
    return _json(ScoreResponse(job.id, int(time.time()), target.name, data, usage))


@router.post("/rerank", response_model=None, responses=answers(RerankResponse))
@router.post("/v2/rerank", response_model=None, responses=answers(RerankResponse))
@router.post("/v1/rerank", response_model=None, responses=answers(RerankResponse))
@access(Access.MODEL_WORK)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Sort documents by their relevance to a query, best first."""
    target = target_of(request, body)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequestError(f"top_n must be at least 1, not {body.top_n}.", param="top_n")
    job = PoolingJob(target, request, "rerank", body.priority)
    texts = _as_list(body.texts(), "documents")
    names = ("query", "documents")
    comparison = await job.compare([body.query], texts, body.truncate_prompt_tokens, names)
    scores = comparison.compute_scores(await job.run(comparison.inputs))
    best = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)[: body.top_n]
    results = [RerankResult(index, scores[index]) for index in best]
    if body.return_documents:
        for result in results:
            result.document = RankedDocument(texts[result.index])
    usage = PooledUsage.of(comparison.inputs)
    return _json(RerankResponse(job.id, target.name, results, usage))


def _as_list(texts: str | list[str], name: str) -> list[str]:
    """Raises InvalidRequestError for too many texts."""
    listed = [texts] if isinstance(texts, str) else texts
    if len(listed) > MAX_INPUTS:
        raise InvalidRequestError(
            f"{name} takes at most {MAX_INPUTS} texts, not {len(listed)}.", param=name
        )
    return listed


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
