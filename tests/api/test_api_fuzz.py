"""Requests that nobody would write: each is answered in shape, and the server stays well."""

from __future__ import annotations

import json
import time

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Reference
from tests.api.serving import Server, until

SECONDS = 8.0
"""After this, what is left of the examples is skipped."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.sampled_from([2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400])
    | st.floats()
    | st.text(st.characters(), max_size=12)
    | st.sampled_from(
        ["", "\ud800", "\x00", "NaN", "🙂", "<|end|>", "user", "assistant", "text", "json_object"]
    )
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
small = st.integers(1, 6)
sampling = {
    "temperature": st.floats(0, 2) | anything,
    "top_p": st.floats(0, 1) | anything,
    "top_k": st.integers(-1, 300) | anything,
    "min_p": st.floats(0, 1) | anything,
    "n": st.integers(1, 3) | anything,
    "min_tokens": st.integers(0, 6) | anything,
    "stop": st.text(min_size=1, max_size=3)
    | st.lists(st.text(min_size=1, max_size=2), max_size=3)
    | anything,
    "stop_token_ids": st.lists(st.integers(0, 261), max_size=3) | anything,
    "seed": st.integers(-(2**63), 2**63 - 1) | anything,
    "presence_penalty": st.floats(-2, 2) | anything,
    "frequency_penalty": st.floats(-2, 2) | anything,
    "repetition_penalty": st.floats(0.1, 3) | anything,
    "logit_bias": st.dictionaries(st.integers(0, 261).map(str), st.floats(-100, 100), max_size=3) | anything,
    "prompt_logprobs": st.integers(0, 5) | anything,
    "priority": st.integers(-5, 5) | anything,
    "stream": st.booleans() | anything,
    "stream_options": st.just({"include_usage": True}) | anything,
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "model": st.just("tiny") | anything,
    "user": anything,
    "unheard_of": anything,
}
prompts = st.text(max_size=20) | st.lists(st.integers(0, 261), min_size=1, max_size=9) | anything
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | anything,
        "content": st.text(max_size=9) | anything,
    }
)
completion = st.fixed_dictionaries(
    {"prompt": prompts, "max_tokens": small | anything},
    optional=sampling | {"logprobs": st.integers(0, 100) | anything, "echo": anything, "best_of": anything},
)
chat = st.fixed_dictionaries(
    {"messages": st.lists(message, max_size=3) | anything, "max_tokens": small | anything},
    optional=sampling
    | {
        "logprobs": st.booleans() | anything,
        "top_logprobs": st.integers(0, 20) | anything,
        "chat_template_kwargs": anything,
        "continue_final_message": anything,
        "max_completion_tokens": small | anything,
    },
)
request = st.tuples(st.just("/v1/completions"), completion | anything) | st.tuples(
    st.just("/v1/chat/completions"), chat | anything
)


def check(answer: httpx.Response) -> None:
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        *events, done, end = answer.content.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        assert all("choices" in json.loads(event.removeprefix(b"data: ")) for event in events)
    elif answer.status_code == 200:
        assert answer.json()["choices"]
    else:
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert error.keys() == {"message", "type", "param", "code"}


def test_every_request_is_answered_in_shape(server: Server, reference: Reference) -> None:
    deadline = time.monotonic() + SECONDS
    statuses: dict[int, int] = {}

    @settings(
        max_examples=500,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(request)
    def one(made: tuple[str, object]) -> None:
        if time.monotonic() > deadline:
            return
        path, body = made
        content = json.dumps(body)  # with NaN, Infinity and lone surrogates as they come
        answer = server.http.post(
            path, content=content, headers={"Content-Type": "application/json"}, timeout=30
        )
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        check(answer)

    one()
    assert statuses[200] >= 20
    assert statuses[400] >= 100
    until(server.is_idle)
    good = {"prompt": "after all that", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=good).json()
    assert answer["choices"][0]["text"] == reference.text("after all that", 8)
