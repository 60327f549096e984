"""GET /version and /metrics."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import server_of
from toolkit.metrics import CONTENT_TYPE
from toolkit.version import __version__

router = APIRouter(tags=["operation"])


class Version(msgspec.Struct):
    version: str


@router.get("/version", response_model=None, responses=answers(Version))
@access(Access.OPEN)
async def version() -> Response:
    """Return tk's version."""
    return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")


@router.get("/metrics", response_model=None)
@access(Access.OPEN)
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    return Response(await server_of(request).exposition.get(), media_type=CONTENT_TYPE)
