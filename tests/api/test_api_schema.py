"""Requests generated from the OpenAPI document: no 5xx, and responses as documented."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.server import Server, until

SECONDS = 30 * float(os.environ.get("TK_TEST_SCALE", "0.15"))
LONGEST = 90.0  # seconds for a response


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_from_the_document_get_documented_responses(server: Server) -> None:
    """Half of the bodies are valid."""
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 8
    deadline = time.monotonic() + SECONDS
    answered: dict[str, set[int]] = {}

    def ask(case: Case) -> None:
        case.body = bounded(case.body)
        try:
            answer = case.call(base_url=server.url, timeout=LONGEST)
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader, UnicodeError):
            return  # a client cannot send it
        checks = [not_a_server_error]
        if not answer.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            checks.append(response_schema_conformance)  # it cannot check streams
        case.validate_response(answer, checks=checks)
        answered.setdefault(case.operation.label, set()).add(answer.status_code)

    def is_answered(label: str) -> Callable[[], bool]:
        return lambda: label in answered

    for index, operation in enumerate(operations):
        for part, mode in enumerate((GenerationMode.POSITIVE, GenerationMode.NEGATIVE)):
            left = 2 * (len(operations) - index) - part
            over = time.monotonic() + (deadline - time.monotonic()) / left
            check(operation.as_strategy(mode), ask, over, is_answered(operation.label))
    assert answered.keys() == {operation.label for operation in operations}
    until(server.is_idle)
    assert server.http.get("/health").status_code == 200


def check(
    strategy: object, ask: Callable[[Case], None], over: float, is_answered: Callable[[], bool]
) -> None:
    """Ask until time `over` and the first response, which may be later on a slow machine."""

    @settings(
        max_examples=300,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Case) -> None:
        if is_answered() and time.monotonic() > over:
            raise TimeIsUpError
        ask(case)

    # An operation without parameters has no invalid requests.
    with contextlib.suppress(Unsatisfiable, TimeIsUpError):
        one()


class TimeIsUpError(KeyboardInterrupt):
    """Ends the generation of examples. Hypothesis reports any other exception as a failure."""


def bounded(body: object) -> object:
    """Limit max_tokens to 3: a full context would be valid, but slow."""
    if not isinstance(body, dict):
        return body
    return {
        k: 3 if k.startswith("max_") and isinstance(v, int) and v > 3 else v
        for k, v in body.items()
    }
