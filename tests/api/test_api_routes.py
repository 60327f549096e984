"""Access to routes: every route declares it, and the table agrees with the router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from toolkit.api.app import ROUTERS, make_app
from toolkit.api.http.routes import Access, RouteTable, access
from toolkit.api.http.server import ServedModel, Server
from toolkit.config import ServerConfig
from toolkit.metrics import Metrics

EXPECTED = {
    Access.OPEN: {
        "GET /livez", "GET /readyz", "GET /health", "GET /ping", "POST /ping", "GET /version",
        "GET /metrics", "GET /",
    },
    Access.KEY: {
        "GET /v1/models", "GET /v1/models/{model}", "GET /tokenizer_info", "GET /load",
        "GET /props", "GET /slots", "GET /lora-adapters",
        "GET /api/tags", "GET /api/ps", "POST /api/show", "POST /api/pull", "GET /api/version",
        "GET /v1/responses/{id}", "DELETE /v1/responses/{id}",
        "POST /v1/responses/{id}/cancel", "GET /v1/responses/{id}/input_items",
    },
    Access.ADMIN: {
        "GET /tk/requests", "DELETE /tk/requests/{id}", "POST /reset_prefix_cache",
        "POST /abort_requests",
        "GET /server_info", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
    },
    Access.MODEL_WORK: {
        "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses",
        "POST /v1/responses/input_tokens",
        "POST /v1/audio/transcriptions", "POST /v1/audio/translations",
        "POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/embeddings",
        "POST /v1/score", "POST /v1/rerank", "POST /score", "POST /rerank", "POST /v2/rerank",
        "POST /pooling", "POST /classify", "POST /invocations",
        "POST /tokenize", "POST /detokenize",
        "POST /completion", "POST /completions", "POST /apply-template",
        "POST /embedding", "POST /embeddings",
        "POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> RouteTable:
    table = RouteTable()
    for router in ROUTERS:
        table.add(router.routes)
    return table


def test_routes_are_open_keyed_admin_or_model_work(table: RouteTable) -> None:
    engine: Any = SimpleNamespace(metrics=Metrics("tk", "model"))
    server = Server(ServerConfig(), [ServedModel(engine, ("model",))])
    document = make_app(server).access_control.app.openapi()
    routes = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    found = {
        needed: {route for route in routes if table.find(*route.split(" ")) is needed}
        for needed in Access
    }
    assert found == EXPECTED


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_a_route_that_declares_no_access_is_refused(method: str) -> None:
    router = APIRouter()

    @getattr(router, method)("/v1/forgotten")
    def forgotten() -> None: ...

    with pytest.raises(AssertionError, match="/v1/forgotten"):
        RouteTable().add(router.routes)


def test_a_mounted_application_declares_no_access_and_is_refused() -> None:
    app = FastAPI(openapi_url=None)
    app.mount("/files", FastAPI())
    with pytest.raises(AssertionError, match="/files"):
        RouteTable().add(app.routes)
    table = RouteTable()
    table.add(app.routes, open_paths=("/files",))
    assert table.find("GET", "/files/any/where") is Access.OPEN
    assert table.find("GET", "/filesystem") is Access.KEY


def test_the_first_route_that_takes_a_request_decides() -> None:
    router = APIRouter()

    @router.get("/things/{id:path}")
    def thing(id: str) -> None: ...

    @router.delete("/things/{id:path}")
    @access(Access.ADMIN)
    def delete(id: str) -> None: ...

    @router.get("/things/all")
    @access(Access.OPEN)
    def unreachable() -> None: ...

    table = RouteTable()
    table.add(router.routes)
    assert table.find("GET", "/things/a/b") is Access.KEY
    assert table.find("GET", "/things/all") is Access.KEY
    assert table.find("DELETE", "/things/a/b") is Access.ADMIN
    # Starlette's patterns, too, match a path that ends with a line break.
    assert table.find("DELETE", "/things/a\n") is Access.ADMIN


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("POST", "/v1/no/such/route", Access.MODEL_WORK),
        ("POST", "/v1/models", Access.MODEL_WORK),
        ("POST", "/nowhere", Access.MODEL_WORK),
        ("GET", "/nowhere", Access.KEY),
        ("GET", "/v1/completions", Access.KEY),
        ("DELETE", "/tk/requests", Access.KEY),
        ("POST", "/health", Access.OPEN),
        ("OPTIONS", "/health", Access.OPEN),
    ],
)
def test_requests_that_no_route_takes_need_a_key(
    table: RouteTable, method: str, path: str, needed: Access
) -> None:
    """A POST passes the limits. A path that is open for another method stays open."""
    assert table.find(method, path) is needed
