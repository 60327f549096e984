"""Defaults of sampling parameters: the request first, then the model, then OpenAI."""

from __future__ import annotations

from toolkit.api.openai.schemas import ChatRequest, CompletionRequest

DEFAULTS = {"temperature": 0.3, "top_k": 5}


def test_a_request_overrides_the_model_s_defaults():
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.0}
    params = ChatRequest.model_validate(body).params(DEFAULTS)
    assert (params.temperature, params.top_k) == (0.0, 5)


def test_parameters_without_a_default_have_openai_s():
    params = CompletionRequest.model_validate({"prompt": "hi"}).params({})
    assert (params.temperature, params.top_p, params.max_tokens, params.n) == (1.0, 1.0, 16, 1)
