"""/docs and its OpenAPI document: complete, and true about requests and responses."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from tests.server import Server

ENDPOINTS = {
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/embeddings"),
    ("POST", "/v1/score"), ("POST", "/v1/rerank"), ("POST", "/pooling"), ("POST", "/classify"),
    ("POST", "/invocations"), ("POST", "/abort_requests"), ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"), ("GET", "/health"), ("GET", "/livez"), ("GET", "/readyz"),
    ("GET", "/ping"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/server_info"),
    ("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/embed"),
    ("POST", "/api/embeddings"), ("POST", "/api/pull"), ("POST", "/api/show"),
    ("GET", "/api/tags"), ("GET", "/api/ps"),
    ("GET", "/api/version"), ("GET", "/load"), ("GET", "/tk/requests"),
    ("DELETE", "/tk/requests/{id}"), ("POST", "/reset_prefix_cache"),
}  # fmt: skip
POOLING = (
    "/v1/embeddings", "/v1/score", "/v1/rerank", "/api/embed", "/api/embeddings", "/score",
    "/rerank", "/v2/rerank", "/pooling", "/classify", "/embedding", "/embeddings",
)  # fmt: skip


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    return server.http.get("/openapi.json").json()


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_the_page_is_served(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    described = operations(document)
    assert described.keys() >= ENDPOINTS
    for operation in described.values():
        assert operation["description"]
        assert {"200", "default"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in schemas
            for one in value.values():
                check(one)
        elif isinstance(value, list):
            for one in value:
                check(one)

    check(document)


def test_examples_work_and_responses_match_their_schemas(
    http: httpx.Client, document: dict[str, Any]
) -> None:
    tried = 0
    for (method, path), operation in operations(document).items():
        needs_more = path in POOLING or "lora" in path  # another model, or adapters
        if method == "DELETE" or "{" in path or needs_more:
            continue
        body = None
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            if "application/json" not in content:  # a form with a file
                continue
            schema = content["application/json"]["schema"]
            body = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["example"]
        answer = http.request(method, path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        content = operation["responses"]["200"].get("content", {})
        if "application/json" in content:
            jsonschema.validate(
                answer.json(),
                content["application/json"]["schema"] | {"components": document["components"]},
            )
            tried += 1
    assert tried >= 12


def test_errors_match_their_schema(http: httpx.Client, document: dict[str, Any]) -> None:
    described = document["paths"]["/v1/completions"]["post"]["responses"]["default"]["content"][
        "application/json"
    ]
    for answer in (
        http.post("/v1/completions", json={}),
        http.get("/v1/models/none"),
        http.get("/nowhere"),
    ):
        assert answer.status_code >= 400
        jsonschema.validate(
            answer.json(), described["schema"] | {"components": document["components"]}
        )
