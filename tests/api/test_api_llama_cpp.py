"""llama.cpp's API: /completion and the routes around it, with curl's bodies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests import checkpoints
from tests.api.conftest import CONTEXT, Reference
from toolkit.api.llama_cpp.requests import LlamaCompletionRequest

PROMPT = "The sea is"
GREEDY = {"temperature": 0, "n_predict": 12}
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]


def complete(http: httpx.Client, **body: Any) -> Any:
    """Send a body as curl's -d does, without a type of JSON."""
    answer = http.post("/completion", content=json.dumps({"prompt": PROMPT, **GREEDY, **body}))
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    return answer.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ---- /completion


def test_completion_equals_transformers(http: httpx.Client, reference: Reference) -> None:
    found = complete(http, return_tokens=True)
    assert found["content"] == reference.text(PROMPT, 12)
    assert tuple(found["tokens"]) == reference.tokens(PROMPT, 12)
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (found["model"], found["prompt"], found["truncated"]) == ("tiny", PROMPT, False)
    assert found["tokens_predicted"] == 12
    assert found["tokens_evaluated"] == len(reference.tokenizer.encode(PROMPT))
    assert found["generation_settings"]["n_predict"] == 12
    timings = found["timings"]
    assert timings["predicted_n"] == 12
    assert timings["prompt_n"] + timings["cache_n"] == found["tokens_evaluated"]
    assert all(value > 0 for name, value in timings.items() if name != "cache_n")


def test_stream_ends_with_what_a_complete_answer_has(http: httpx.Client) -> None:
    whole = complete(http, return_tokens=True, n_probs=2)
    *parts, last = events(http, "/completion", prompt=PROMPT, n_probs=2, **GREEDY)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    probabilities = [one for part in parts for one in part["completion_probabilities"]]
    assert [one["id"] for one in probabilities] == whole["tokens"]
    assert [len(one["top_logprobs"]) for one in probabilities] == [2] * 12
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    assert whole.keys() - last.keys() == {"completion_probabilities"}
    assert last["stop_type"] == "limit"


def test_prompts_are_texts_ids_and_mixtures(http: httpx.Client, reference: Reference) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    rest = reference.tokenizer.decode(ids[2:])
    prompts = [PROMPT, ids, [*ids[:2], rest], {"prompt_string": PROMPT}]
    found = complete(http, prompt=prompts)
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    assert {one["content"] for one in found} == {reference.text(PROMPT, 12)}
    for prompt in (ids, [*ids[:2], rest], [PROMPT]):
        assert complete(http, prompt=prompt)["content"] == reference.text(PROMPT, 12)
    assert [one["index"] for one in complete(http, n_cmpl=2)] == [0, 1]


def test_prompt_alone_is_computed(http: httpx.Client) -> None:
    found = complete(http, n_predict=0)
    assert (found["content"], found["tokens_predicted"]) == ("", 0)


def test_stop_types(http: httpx.Client, reference: Reference) -> None:
    word = reference.text(PROMPT, 12)[4:7]
    found = complete(http, stop=[word])
    assert (found["stop_type"], found["stopping_word"]) == ("word", word)
    assert word not in found["content"]
    yes = complete(http, grammar='root ::= "yes"')
    assert (yes["stop_type"], yes["content"]) == ("eos", "yes")
    limited = complete(http, prompt="ab" * (CONTEXT // 2 - 4), n_predict=CONTEXT)
    assert (limited["stop_type"], limited["truncated"]) == ("limit", True)


def test_json_schema_constrains_the_answer(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    found = json.loads(complete(http, json_schema=schema, n_predict=64)["content"])
    assert set(found) <= {1, 2}
    assert len(found) == 2


def test_response_fields_are_chosen(http: httpx.Client) -> None:
    names = ["content", "generation_settings/n_predict", "timings/no", "none"]
    assert complete(http, response_fields=names).keys() == {"content", "n_predict"}


def test_timings_are_in_each_event(http: httpx.Client) -> None:
    for path, body in (
        ("/completion", {"prompt": PROMPT, **GREEDY}),
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 3}),
    ):
        found = events(http, path, timings_per_token=True, **body)
        counts = [one["timings"]["predicted_n"] for one in found]
        assert counts == sorted(counts)
        assert counts[-1] == (12 if path == "/completion" else 3)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1}, {"top_k": 7, "min_p": 0.1}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 2**32 - 1}, {"seed": None}),
        ({"n_predict": -1}, {"max_tokens": None}),
        ({"n_predict": 3, "max_tokens": 5}, {"max_tokens": 3}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, {"penalty_window": 64}),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {5: 1.5}}),
        ({"logit_bias": [[5, 1.5], [6, False]]}, {"bad_words_token_ids": [[6]]}),
        ({"logit_bias": {"5": -1}}, {"logit_bias": {5: -1}}),
        ({"mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1.0}, {"temperature": 1.0}),
    ],
)
def test_options_become_sampling_parameters(body: dict[str, Any], found: dict[str, Any]) -> None:
    request = LlamaCompletionRequest(prompt=PROMPT, **body)
    made = request.params({}, None)
    assert {name: getattr(made, name) for name in found} == found


def test_a_bias_of_a_text_is_that_of_its_tokens() -> None:
    tokenizer: Any = checkpoints.make_tokenizer()
    request = LlamaCompletionRequest(prompt=PROMPT, logit_bias=[["ab", -0.5]])
    biases = request.params({}, tokenizer).logit_bias
    assert biases == dict.fromkeys(tokenizer.encode("ab", add_special_tokens=False), -0.5)


def test_options_that_are_off_have_no_effect(http: httpx.Client) -> None:
    complete(
        http, n_predict=1, mirostat=0, typical_p=1.0, dry_multiplier=0, xtc_probability=0.0,
        dynatemp_range=0, lora=[], cache_prompt=False, id_slot=-1, n_keep=0, grammar="", min_keep=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"mirostat": 2}, "mirostat is not supported: the engine does not have this sampler"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"xtc_probability": 0.5}, "xtc_probability is not supported"),
        ({"typical_p": 0.7}, "typical_p 0.7 is not supported"),
        ({"top_n_sigma": 1}, "top_n_sigma 1 is not supported"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora is not supported: name one adapter as model"),
        ({"prompt": []}, "prompt must be one to 2048 prompts; got 0"),
        ({"prompt": [[True]]}, "prompt must be a text, token ids and texts"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}}, "/v1/chat/completions"),
        ({"grammar": "root ::=", "json_schema": {}}, "grammar and json_schema exclude each other"),
        ({"grammar": "root ::= x y ("}, "grammar"),
        ({"n_probs": 101}, "n_probs must be"),
        ({"repeat_penalty": 0}, "repeat_penalty must be"),
        ({"logit_bias": [[1, True]]}, "logit_bias must have pairs such as"),
        ({"logit_bias": [3]}, "logit_bias must have pairs such as"),
        ({"logit_bias": {"1" * 20_000: 1}}, "logit_bias takes texts of at most 16384"),
        ({"stream": "yes"}, 'stream must be true or false; got "yes"'),
    ],
)
def test_options_are_refused_with_a_reason(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    answer = http.post("/completion", json={"prompt": PROMPT, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


# ---- fields of chats


def test_chats_take_fields_of_llama_cpp(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, "cache_prompt": True, "id_slot": 0}
    answer = http.post(
        "/v1/chat/completions",
        json=body | {"grammar": 'root ::= "yes"', "n_probs": 2, "repeat_penalty": 1.1},
    )
    assert "x-ignored-fields" not in answer.headers
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "yes"
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    schema = {"json_schema": {"const": 7}, "response_format": {"type": "text"}}
    answer = http.post("/v1/chat/completions", json=body | schema)
    assert answer.json()["choices"][0]["message"]["content"] == "7"
    answer = http.post("/v1/chat/completions", json=body | {"repeat_penalty": 0})
    assert "repetition_penalty must be above 0" in answer.json()["error"]["message"]


# ---- other routes


def test_paths_without_v1_are_those_of_openai(http: httpx.Client) -> None:
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/v1/health").status_code == 200
    answer = http.post("/chat/completions", json={"messages": QUESTION, "max_tokens": 2}).json()
    assert answer["usage"]["completion_tokens"] == 2


def test_properties_describe_the_model(http: httpx.Client) -> None:
    found = http.get("/props").json()
    assert found["model_alias"] == "tiny"
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["default_generation_settings"]["n_ctx"] == CONTEXT
    assert "assistant" in found["chat_template"]
    slots = http.get("/slots").json()
    assert len(slots) == found["total_slots"]
    assert slots[0] == {"id": 0, "n_ctx": CONTEXT, "is_processing": False}
    assert http.get("/slots?fail_on_no_slot=1").status_code == 200
    assert http.get("/lora-adapters").json() == []


def test_templated_prompt_continues_as_the_chat(http: httpx.Client) -> None:
    prompt = http.post("/apply-template", json={"messages": QUESTION}).json()["prompt"]
    chat = {"messages": QUESTION, "temperature": 0, "max_tokens": 12}
    answer = http.post("/v1/chat/completions", json=chat).json()
    found = complete(http, prompt=prompt)
    assert found["content"] == answer["choices"][0]["message"]["content"]
    assert found["tokens_evaluated"] == answer["usage"]["prompt_tokens"]
    body = {"messages": QUESTION, "chat_template": "x"}
    answer = http.post("/apply-template", json=body)
    assert "chat_template is not supported" in answer.json()["error"]["message"]


def test_tokens_of_a_text_and_back(http: httpx.Client, reference: Reference) -> None:
    text = "The sea á"
    plain = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert plain == reference.tokenizer.encode(text, add_special_tokens=False)
    body = {"content": text, "add_special": True, "with_pieces": True}
    pieces = http.post("/tokenize", content=json.dumps(body)).json()["tokens"]
    assert [one["id"] for one in pieces] == reference.tokenizer.encode(text)
    as_bytes = [p.encode() if isinstance(p := one["piece"], str) else bytes(p) for one in pieces]
    assert b"".join(as_bytes).endswith(text.encode())
    assert http.post("/detokenize", json={"tokens": plain}).json()["content"] == text
    answer = http.post("/tokenize", json={"content": text, "parse_special": False})
    assert "parse_special must be true" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/infill", "the models here do not fill in the middle"),
        ("/lora-adapters", "name one adapter as model"),
        ("/props", "flags of tk serve"),
        ("/slots/0?action=save", "not saved"),
        ("/embedding", "--pooling"),
    ],
)
def test_what_is_missing_is_refused_by_name(http: httpx.Client, path: str, words: str) -> None:
    answer = http.post(path, json={"content": "x"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
