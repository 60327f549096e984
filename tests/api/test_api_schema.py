"""Requests made from the server's own OpenAPI document: answered in time, never with 5xx, in the documented shapes."""

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

SECONDS = 200 * float(os.environ.get("TK_TEST_SCALE", "0.15"))
LONGEST = 90.0
"""Seconds that any answer may take."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_the_document_allows_is_answered_in_shape(server: Server) -> None:
    """Bodies as they should be, and bodies that are wrong somewhere, in equal parts."""
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
            return  # what no client can send
        checks = [not_a_server_error]
        if not answer.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            checks.append(
                response_schema_conformance
            )  # which takes a stream's text for one of its events
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
    """Asks until it is over, and something was answered, which on a slow machine may come later."""

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

    with contextlib.suppress(
        Unsatisfiable, TimeIsUpError
    ):  # an operation without parameters cannot be asked wrongly
        one()


class TimeIsUpError(KeyboardInterrupt):
    """Ends the making of examples, which takes longer than asking; Hypothesis takes only an interrupt for no failure."""


def bounded(body: object) -> object:
    """The same without the wish for a whole context of tokens: it would be right, and take long."""
    if not isinstance(body, dict):
        return body
    return {
        k: 3 if k.startswith("max_") and isinstance(v, int) and v > 3 else v
        for k, v in body.items()
    }
