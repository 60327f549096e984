"""/v1/completions with the official client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from tests import checkpoints
from tests.api.conftest import CONTEXT, Reference
from tests.server import Server, until
from toolkit.worker.worker import Worker

PROMPT = "Once"
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def stop(reference: Reference) -> str:
    """Three characters, one token each, that first occur in the middle of the greedy answer."""
    text = reference.text(PROMPT, 48)
    return next(
        part
        for part in (text[i : i + 3] for i in range(8, len(text)))
        if part.isascii() and part.isprintable() and len(part) == 3
    )


def streamed(client: openai.OpenAI, **options: object) -> dict[int, str]:
    """The streamed text of each choice."""
    texts: dict[int, str] = {}
    for chunk in client.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("prompt", [PROMPT, "€uro", "a" * 200])
def test_greedy_text_equals_transformers(
    client: openai.OpenAI, reference: Reference, prompt: str
) -> None:
    answer = client.completions.create(prompt=prompt, max_tokens=24, **GREEDY)
    assert answer.choices[0].text == reference.text(prompt, 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt.encode())
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(prompt.encode()) + 24


def test_token_id_prompt_equals_its_text(client: openai.OpenAI, reference: Reference) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    answer = client.completions.create(prompt=ids, max_tokens=12, **GREEDY)
    assert answer.choices[0].text == reference.text(PROMPT, 12)


@pytest.mark.parametrize("prompt", [PROMPT, "", [1, 2, 3]])
def test_streamed_text_equals_the_complete_text(client: openai.OpenAI, prompt: object) -> None:
    prompt = prompt or "\n"
    text = client.completions.create(prompt=prompt, max_tokens=60, **GREEDY).choices[0].text
    assert text
    assert streamed(client, prompt=prompt, max_tokens=60, **GREEDY) == {0: text}


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, reference: Reference) -> None:
    prompts = ["one", "two and more", "three"]
    expected = {i: reference.text(p, 16) for i, p in enumerate(prompts)}
    answer = client.completions.create(prompt=prompts, max_tokens=16, **GREEDY)
    assert {c.index: c.text for c in answer.choices} == expected
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 3 * 16
    assert streamed(client, prompt=prompts, max_tokens=16, **GREEDY) == expected


def test_n_answers_are_indexed_prompt_by_prompt(
    client: openai.OpenAI, reference: Reference
) -> None:
    """With temperature 0, n=2 gives two equal answers."""
    answer = client.completions.create(prompt=["one", "two"], n=2, max_tokens=8, **GREEDY)
    one, two = reference.text("one", 8), reference.text("two", 8)
    assert one != two
    assert [(c.index, c.text) for c in answer.choices] == [(0, one), (1, one), (2, two), (3, two)]
    assert streamed(client, prompt=["one", "two"], n=2, max_tokens=8, **GREEDY) == {
        0: one,
        1: one,
        2: two,
        3: two,
    }


def test_n_sampled_answers_differ(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=3, max_tokens=24, seed=5)
    assert len({c.text for c in answer.choices}) == 3
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens <= 72


@pytest.mark.parametrize("included", [False, True])
def test_stop_string_across_tokens_ends_the_answer(
    client: openai.OpenAI, reference: Reference, stop: str, included: bool
) -> None:
    text = reference.text(PROMPT, 48)
    expected = text[: text.index(stop) + (len(stop) if included else 0)]
    options = GREEDY | {
        "prompt": PROMPT, "max_tokens": 48, "stop": ["never there", stop],
        "extra_body": {"ignore_eos": True, "include_stop_str_in_output": included},
    }  # fmt: skip
    choice = client.completions.create(**options).choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    assert choice.stop_reason == stop
    assert streamed(client, **options) == {0: expected}


def test_a_stop_string_ends_the_request_in_the_engine(
    server: Server, client: openai.OpenAI, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not see stop strings: without an abort it generates max_tokens."""
    steps, execute = [], Worker.execute
    monkeypatch.setattr(Worker, "execute", lambda *given: steps.append(1) or execute(*given))
    answer = client.completions.create(prompt=PROMPT, stop=stop, max_tokens=8000, **GREEDY)
    assert answer.choices[0].stop_reason == stop
    until(server.is_idle)
    assert 0 < len(steps) < 1000


def test_stream_never_sends_part_of_a_stop_string(
    client: openai.OpenAI, reference: Reference, stop: str
) -> None:
    text = reference.text(PROMPT, 48)
    before = text[: text.index(stop)]
    sent = ""
    for chunk in client.completions.create(
        prompt=PROMPT, max_tokens=48, stop=stop, stream=True, **GREEDY
    ):
        sent += chunk.choices[0].text
        assert before.startswith(sent)
    assert sent == before


def test_held_back_text_is_sent_at_the_end(
    client: openai.OpenAI, reference: Reference, stop: str
) -> None:
    """The answer ends at max_tokens, one character before the end of the stop string."""
    text = reference.text(PROMPT, 48)
    at = text.index(stop)
    length = next(n for n in range(1, 49) if reference.text(PROMPT, n) == text[: at + 2])
    options = GREEDY | {"prompt": PROMPT, "max_tokens": length, "stop": stop}
    assert streamed(client, **options) == {0: text[: at + 2]}
    choice = client.completions.create(**options).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: at + 2], "length")


def test_end_token_ends_the_answer_without_text(
    client: openai.OpenAI, reference: Reference
) -> None:
    """A bias makes it the likeliest token."""
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        temperature=0,
        max_tokens=5,
        logit_bias={str(checkpoints.EOS): 100},
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


def test_model_end_tokens_apply_with_another_tokenizer(base: Server, reference: Reference) -> None:
    line_break = reference.tokenizer.encode("\n")[0]
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 5,
        "logit_bias": {str(line_break): 100},
    }
    answer = base.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


def test_logprobs_equal_transformers(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.completions.create(prompt=PROMPT, max_tokens=10, logprobs=4, **GREEDY)
    given = answer.choices[0].logprobs
    prompt = reference.tokenizer.encode(PROMPT)
    tokens = list(reference.tokens(PROMPT, 10))
    expected = checkpoints.logits(reference.model, prompt + tokens)[
        len(prompt) - 1 : -1
    ].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(given.token_logprobs), chosen, atol=1e-4, rtol=1e-4)
    for position, top in enumerate(given.top_logprobs):
        likeliest = expected[position].topk(4).values
        # Fewer than four if several tokens have no text: they are parts of characters.
        assert top
        assert all((likeliest - value).abs().min() < 1e-4 for value in top.values())


@pytest.mark.parametrize("stream", [False, True])
def test_logprob_lists_are_as_long_as_the_answer(client: openai.OpenAI, stream: bool) -> None:
    options = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 30,
        "logprobs": 2,
        "seed": 3,
        "extra_body": {"allowed_token_ids": list(range(90))},  # no special tokens
    }
    if stream:
        parts = [c.choices[0] for c in client.completions.create(stream=True, **options)]
    else:
        parts = client.completions.create(**options).choices
    tokens = [t for p in parts if p.logprobs for t in p.logprobs.tokens]
    chosen = [v for p in parts if p.logprobs for v in p.logprobs.token_logprobs]
    top = [t for p in parts if p.logprobs for t in p.logprobs.top_logprobs]
    offsets = [o for p in parts if p.logprobs for o in p.logprobs.text_offset]
    assert len(tokens) == len(chosen) == len(top) == len(offsets) == 30
    assert offsets == [len("".join(tokens[:i])) for i in range(30)]
    assert all(v <= 0 for v in chosen)
    for token, value, table in zip(tokens, chosen, top, strict=True):
        assert table[token] == value  # exactly: evaluation harnesses compare with ==
        assert 1 <= len(table) <= 3


def test_seed_repeats_the_text_alone_and_in_a_batch(server: Server) -> None:
    with server.openai() as client, ThreadPoolExecutor(8) as pool:

        def text(seed: int | None) -> str:
            answer = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=40, temperature=0.9, top_p=0.95, seed=seed
            )
            return answer.choices[0].text

        alone = text(11)
        assert alone == text(11)
        assert alone != text(12)
        busy = list(pool.map(text, [11, None, 12, None, 11, None, 7, 11]))
    assert [busy[0], busy[4], busy[7]] == [alone] * 3


def test_answers_without_a_seed_differ(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30).choices[0].text
        for _ in range(2)
    ]
    assert texts[0] != texts[1]


def test_repeated_prompt_is_reported_as_cached(client: openai.OpenAI) -> None:
    prompt = "Only this test sends this prompt. " * 4
    first, again = (
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2
        ).usage.prompt_tokens_details.cached_tokens
        for _ in range(2)
    )
    assert first == 0
    assert len(prompt) - 32 <= again < len(prompt)
    assert again % 16 == 0  # complete blocks


def test_n_answers_are_not_cache_hits_of_each_other(
    client: openai.OpenAI,
) -> None:
    prompt = "Only this test asks for two answers to this. " * 4
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_stream_usage_comes_last_on_request(client: openai.OpenAI) -> None:
    options = GREEDY | {"prompt": [PROMPT, "and"], "max_tokens": 6}
    usage = client.completions.create(**options).usage
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == usage.prompt_tokens == len(PROMPT) + 3
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens == 12
    assert all(c.usage is None for c in chunks[:-1])
    plain = list(client.completions.create(stream=True, **options))
    assert all(c.choices for c in plain)


def test_stream_bytes_are_server_sent_events(http: httpx.Client) -> None:
    # On a busy machine a single answer may arrive as one event.
    body = {"prompt": [PROMPT] * 4, "max_tokens": 20, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert "content-length" not in answer.headers
        sent = answer.read()
    events = sent.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert len(events) >= 4 + 2
    for event in events[:-2]:
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        chunk = json.loads(event.removeprefix(b"data: "))
        assert chunk["object"] == "text_completion"
        assert {"id", "created", "model", "choices"} <= chunk.keys()


def test_reply_has_the_json_fields_clients_expect(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    assert {"index", "text", "finish_reason", "logprobs"} <= body["choices"][0].keys()


def test_model_can_be_omitted(http: httpx.Client, reference: Reference) -> None:
    answer = http.post(
        "/v1/completions",
        json={"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "ignore_eos": True},
    )
    assert answer.json()["choices"][0]["text"] == reference.text(PROMPT, 5)


def test_context_can_be_filled_to_the_last_token(client: openai.OpenAI) -> None:
    prompt = [7] * (CONTEXT - 5)
    answer = client.completions.create(prompt=prompt, max_tokens=5, **GREEDY)
    assert answer.usage.total_tokens == CONTEXT


def test_prompt_logprobs_equal_transformers(http: httpx.Client, reference: Reference) -> None:
    tokens = reference.tokenizer.encode("prompt logprobs")
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    given = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    expected = checkpoints.logits(reference.model, tokens).log_softmax(-1)
    assert len(given) == len(tokens)
    assert given[0] is None
    for position in range(1, len(tokens)):
        value = given[position][str(tokens[position])]["logprob"]
        assert value == pytest.approx(expected[position - 1, tokens[position]].item(), abs=1e-4)


def test_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny", "org/other/name"]
    assert models[0].max_model_len == CONTEXT
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"
