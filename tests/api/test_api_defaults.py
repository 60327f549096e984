"""What a request leaves out comes from the model; what it says stands."""

from __future__ import annotations

from toolkit.api.openai.schemas import ChatRequest, CompletionRequest

DEFAULTS = {"temperature": 0.3, "top_k": 5}


def test_what_a_request_says_stands_before_the_models_defaults():
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.0}
    params = ChatRequest.model_validate(body).params(DEFAULTS)
    assert (params.temperature, params.top_k) == (0.0, 5)


def test_what_neither_says_is_openais_default():
    params = CompletionRequest.model_validate({"prompt": "hi"}).params({})
    assert (params.temperature, params.top_p, params.max_tokens, params.n) == (1.0, 1.0, 16, 1)
