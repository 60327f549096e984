"""Requests generated from the OpenAPI document: no 5xx, and responses as documented."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.server import Server, until

NUM_EXAMPLES = int(20 * float(os.environ.get("TK_TEST_SCALE", "0.1")))
"""For each operation, of valid requests, and of invalid ones."""
STREAMS = ("text/event-stream", "application/x-ndjson")
LONGEST = 90.0  # seconds for a response


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_from_the_document_get_documented_responses(server: Server) -> None:
    """Half of the bodies are valid."""
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 8
    answered: set[str] = set()

    def ask(case: Case) -> None:
        case.body = bounded(case.body)
        try:
            answer = case.call(base_url=server.url, timeout=LONGEST)
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader, UnicodeError):
            return  # a client cannot send it
        checks = [not_a_server_error]
        if not answer.headers.get("content-type", [""])[0].startswith(STREAMS):
            checks.append(response_schema_conformance)  # it cannot check streams
        case.validate_response(answer, checks=checks)
        answered.add(case.operation.label)

    for operation in operations:
        check(operation.as_strategy(GenerationMode.POSITIVE), ask)
        if operation.body:  # a path is never invalid
            check(operation.as_strategy(GenerationMode.NEGATIVE), ask)
    assert answered == {operation.label for operation in operations}
    until(server.is_idle)
    assert server.http.get("/health").status_code == 200


def check(strategy: object, ask: Callable[[Case], None]) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Case) -> None:
        ask(case)

    one()


def bounded(body: object) -> object:
    """Limit max_tokens to 3: a full context would be valid, but slow."""
    if not isinstance(body, dict):
        return body
    return {
        k: 3 if k.startswith("max_") and isinstance(v, int) and v > 3 else v
        for k, v in body.items()
    }
