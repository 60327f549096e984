"""Fields of requests about drafts, and drafts in usage and metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.server import Server, until

ASK = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 60}


def answer(server: Server, **more: Any) -> tuple[str, dict[str, int]]:
    """Return (text, details of the usage)."""
    response = server.http.post("/v1/chat/completions", json=ASK | {"ignore_eos": True} | more)
    assert response.status_code == 200, response.text
    body = response.json()
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    details |= body["usage"].get("completion_tokens_details", {})
    return body["choices"][0]["message"]["content"], details


def metric(server: Server, name: str) -> float:
    return server.metric(f"tk:spec_decode_{name}_total")


def metrics(server: Server) -> Counter[str]:
    names = ("num_accepted_tokens", "num_draft_tokens")
    return Counter({name: int(metric(server, name)) for name in names})


def test_a_prediction_is_guessed_from(two_workers: Server) -> None:
    text, _ = answer(two_workers, num_speculative_tokens=0)
    before = metrics(two_workers)
    used = Counter[str]()
    for content in (text, [{"type": "text", "text": text}]):
        again, details = answer(two_workers, prediction={"type": "content", "content": content})
        assert again == text
        assert details["accepted_prediction_tokens"] >= 8  # not all of the text is valid UTF-8
        used["num_accepted_tokens"] += details["accepted_prediction_tokens"]
        used["num_draft_tokens"] += sum(details.values())
    until(lambda: metrics(two_workers) - before == used)
    assert metric(two_workers, "num_drafts") > 0
    first = two_workers.metric("tk:spec_decode_num_accepted_tokens_per_pos_total", position="0")
    assert 0 < first <= metric(two_workers, "num_drafts")


def test_a_request_can_turn_drafts_off(two_workers: Server) -> None:
    text, details = answer(two_workers, num_speculative_tokens=0)
    prediction = {"type": "content", "content": text}
    before = metric(two_workers, "num_draft_tokens")
    again, details = answer(two_workers, num_speculative_tokens=0, prediction=prediction)
    assert again == text
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    assert metric(two_workers, "num_draft_tokens") == before
    body = {"prompt": "Hello", "max_tokens": 4, "num_speculative_tokens": 0}
    assert two_workers.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "other", "content": "text"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ],
    ids=str,
)
def test_bad_values_are_refused(two_workers: Server, more: dict[str, Any], param: str) -> None:
    response = two_workers.http.post("/v1/chat/completions", json=ASK | more)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
