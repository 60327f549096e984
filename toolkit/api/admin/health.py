"""GET /livez, /readyz, /health: probes."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import server_of
from toolkit.errors import ServerUnavailableError

router = APIRouter(tags=["operation"])


@router.get("/livez", response_model=None)
@access(Access.OPEN)
async def livez() -> Response:
    """Return 200 while the process answers at all. Restart it if this fails."""
    return Response()


@router.get("/health", response_model=None)
@access(Access.OPEN)
async def health(request: Request) -> Response:
    """Return 200 if the engine completes a step now or did so within the last second, else 503.

    The error names the cause. With several engines all must pass, except one that restarts while
    the others work."""
    await server_of(request).check()
    return JSONResponse({"status": "ok"})  # which clients of llama.cpp read


@router.get("/readyz", response_model=None)
@access(Access.OPEN)
async def readyz(request: Request) -> Response:
    """Return 200 if the engine, or one of several, is healthy; 503 also while shutting down.

    Send the server no requests while this fails."""
    if request.app.state.gate.access_control.is_draining:
        raise ServerUnavailableError("The server is shutting down.")
    await server_of(request).check_some()
    return Response()
