"""POST /v1/score and /v1/rerank. Fields and answers are vLLM's, and those of Jina's and Cohere's rerankers."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from toolkit.api.http.body_fields import Body, Route, WholeBody
from toolkit.api.http.openapi import answers
from toolkit.api.http.service import service_for
from toolkit.api.openai.schemas import Int, Text
from toolkit.api.pooling.inputs import MAX_INPUTS, PooledUsage, Pooling
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["scoring"], route_class=Route)

_TRUNCATE = Field(
    None,
    description="Tokens that are kept of each text, or pair; -1: as many as the model takes. Without it, more is an error",
)
_PRIORITY = Field(0, description="With --scheduling-policy priority: the smaller runs first")


class ScoreRequest(WholeBody):
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
    text_1: Text | list[Text] = Field(description="One text for all of text_2, or one for each")
    text_2: Text | list[Text]
    truncate_prompt_tokens: Int | None = _TRUNCATE
    priority: Int = _PRIORITY


class RerankDocument(Body):
    text: Text


class RerankRequest(WholeBody):
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
    documents: list[Text | RerankDocument]
    top_n: Int | None = Field(
        None, description="How many of the best are returned; all, when not given"
    )
    return_documents: bool = Field(True, description="Returns the texts beside their numbers")
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


class Document(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    usage: PooledUsage


@router.post("/v1/score", response_model=None, responses=answers(ScoreResponse))
async def score(body: ScoreRequest, request: Request) -> Response:
    """How well texts fit: a cross-encoder's score of each pair, else the cosine of their embeddings."""
    service = service_for(request, body)
    pooling = Pooling(service, request, "score", body.priority)
    firsts, seconds = _as_list(body.text_1, "text_1"), _as_list(body.text_2, "text_2")
    job = await pooling.compare(firsts, seconds, body.truncate_prompt_tokens, ("text_1", "text_2"))
    scores = job.scores(await pooling.run(job.inputs))
    data = [Score(index, value) for index, value in enumerate(scores)]
    usage = PooledUsage.of(job.inputs)
    return _json(ScoreResponse(pooling.id, int(time.time()), service.model_name, data, usage))


@router.post("/v1/rerank", response_model=None, responses=answers(RerankResponse))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents in the order of how well they fit a query, the best first."""
    service = service_for(request, body)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequestError(f"top_n is at least 1; it got {body.top_n}.", param="top_n")
    pooling = Pooling(service, request, "rerank", body.priority)
    texts = _as_list(body.texts(), "documents")
    job = await pooling.compare(
        [body.query], texts, body.truncate_prompt_tokens, ("query", "documents")
    )
    scores = job.scores(await pooling.run(job.inputs))
    best = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)[: body.top_n]
    results = [
        RerankResult(
            index, scores[index], Document(texts[index]) if body.return_documents else msgspec.UNSET
        )
        for index in best
    ]
    return _json(
        RerankResponse(pooling.id, service.model_name, results, PooledUsage.of(job.inputs))
    )


def _as_list(texts: str | list[str], name: str) -> list[str]:
    """Raises InvalidRequestError for one text too many."""
    listed = [texts] if isinstance(texts, str) else texts
    if len(listed) > MAX_INPUTS:
        raise InvalidRequestError(
            f"{name} has {len(listed)} texts; it takes at most {MAX_INPUTS}.", param=name
        )
    return listed


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
