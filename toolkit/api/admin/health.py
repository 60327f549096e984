"""GET /livez, /readyz, /health: what whoever runs the server asks."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.service import Service
from toolkit.errors import ServerUnavailableError

router = APIRouter(tags=["operation"])


@router.get("/livez", response_model=None)
async def livez() -> Response:
    """200 while the process answers at all: restart it when this fails."""
    return Response()


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 when the engine has made a step within the last second, or makes one now; else 503 with the cause. Of several
    engines all have to, but for one that is being started again while the others work.
    """
    service: Service = request.app.state.service
    await service.engine.check()
    return Response()


@router.get("/readyz", response_model=None)
async def readyz(request: Request) -> Response:
    """200 when the engine, or one of several, is well as /health has it; 503 while the server shuts down, too: send it no
    requests when this fails.
    """
    if request.app.state.gate.door.draining:
        raise ServerUnavailableError("The server is shutting down.")
    service: Service = request.app.state.service
    await service.engine.check_some()
    return Response()
