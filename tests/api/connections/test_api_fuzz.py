"""Random requests: each gets a valid response, and the server stays healthy."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Reference
from tests.server import Server, until

NUM_EXAMPLES = int(1000 * float(os.environ.get("TK_TEST_SCALE", "0.15")))

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
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
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
    "logit_bias": st.dictionaries(st.integers(0, 261).map(str), st.floats(-100, 100), max_size=3)
    | anything,
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
messages = st.lists(message, min_size=1, max_size=3) | anything


def body(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Objects with a few of many options: with all of them hardly any would be valid."""
    some = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    made = some.flatmap(
        lambda names: st.fixed_dictionaries(required | {name: optional[name] for name in names})
    )
    return made | made | made | anything


ROUTES = {
    "/v1/completions": body(
        {"prompt": prompts, "max_tokens": small},
        sampling
        | {
            "max_tokens": anything,
            "logprobs": st.integers(0, 100) | anything,
            "echo": st.booleans() | anything,
            "best_of": small | anything,
            "allowed_token_ids": st.lists(st.integers(0, 261), max_size=3) | anything,
            "bad_words": st.lists(st.text(max_size=3), max_size=3) | anything,
            "truncate_prompt_tokens": st.integers(-1, 9) | anything,
            "return_token_ids": st.booleans() | anything,
            "spaces_between_special_tokens": st.booleans() | anything,
            "use_beam_search": st.booleans() | anything,
            "length_penalty": st.floats(-3, 3) | anything,
        },
    ),
    "/v1/chat/completions": body(
        {"messages": messages, "max_tokens": small},
        sampling
        | {
            "max_tokens": anything,
            "logprobs": st.booleans() | anything,
            "top_logprobs": st.integers(0, 20) | anything,
            "chat_template": st.text(max_size=9) | anything,
            "chat_template_kwargs": anything,
            "continue_final_message": anything,
            "echo": st.booleans() | anything,
            "max_completion_tokens": small | anything,
            "return_token_ids": st.booleans() | anything,
        },
    ),
    "/v1/responses": body(
        {"input": st.text(max_size=9) | messages, "max_output_tokens": small},
        dict.fromkeys(
            ("instructions", "temperature", "text", "truncation", "store", "tools", "stream"),
            anything,
        ),
    ),
    "/v1/messages": body(
        {"messages": messages, "max_tokens": small},
        dict.fromkeys(
            ("system", "temperature", "top_k", "stop_sequences", "tools", "stream"), anything
        ),
    ),
    "/tokenize": body(
        {"prompt": st.text(max_size=20) | anything},
        {"messages": messages, "return_token_strs": anything},
    ),
    "/detokenize": body(
        {"tokens": st.lists(st.integers(0, 261), max_size=9) | anything}, {"model": anything}
    ),
}


def check(path: str, answer: httpx.Response) -> None:
    of_openai = path in ("/v1/completions", "/v1/chat/completions")
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        *events, end = answer.content.split(b"\n\n")
        assert end == b""
        if of_openai:
            assert events.pop() == b"data: [DONE]"
        bodies = [json.loads(event[event.index(b"data: ") + 6 :]) for event in events]
        assert all("choices" in one if of_openai else "type" in one for one in bodies)
    elif answer.status_code == 200:
        assert answer.json()["choices"] if of_openai else answer.json()
    else:
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert error.keys() == {"message", "type", "param", "code"}


def test_every_request_gets_a_valid_response(server: Server, reference: Reference) -> None:
    statuses: Counter[int] = Counter()

    def fuzz(path: str, bodies: st.SearchStrategy[Any]) -> None:
        @settings(max_examples=NUM_EXAMPLES // len(ROUTES), suppress_health_check=list(HealthCheck))
        @given(bodies)
        def one(body: object) -> None:
            content = json.dumps(body)  # with NaN, Infinity and lone surrogates as they come
            answer = server.http.post(
                path, content=content, headers={"Content-Type": "application/json"}, timeout=90
            )
            statuses[answer.status_code] += 1
            check(path, answer)

        one()

    for path, bodies in ROUTES.items():
        fuzz(path, bodies)
    assert min(statuses[200], statuses[400]) > NUM_EXAMPLES / 10
    until(server.is_idle)
    good = {"prompt": "after all that", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=good).json()
    assert answer["choices"][0]["text"] == reference.text("after all that", 8)
