"""/v1/chat/completions with the official client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
import torch

from tests import checkpoints
from tests.api.conftest import Reference

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a KV cache?"},
]
GREEDY = {
    "model": "tiny",
    "messages": MESSAGES,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> str:
    """The conversation, rendered by Transformers."""
    return reference.conversation(*MESSAGES)


def test_greedy_answer_equals_transformers(
    client: openai.OpenAI, reference: Reference, prompt: str
) -> None:
    answer = client.chat.completions.create(max_tokens=24, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == reference.text(prompt, 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(reference.tokenizer.encode(prompt))
    assert answer.usage.completion_tokens == 24


def test_stream_sends_role_then_text_then_finish_reason(
    client: openai.OpenAI, reference: Reference, prompt: str
) -> None:
    chunks = list(client.chat.completions.create(max_tokens=24, stream=True, **GREEDY))
    choices = [c.choices[0] for c in chunks]
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert "".join(c.delta.content or "" for c in choices) == reference.text(prompt, 24)
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")


def test_stream_interleaves_n_answers(
    client: openai.OpenAI, reference: Reference, prompt: str
) -> None:
    texts, reasons, roles = {}, {}, {}
    for chunk in client.chat.completions.create(max_tokens=12, n=3, stream=True, **GREEDY):
        choice = chunk.choices[0]
        roles[choice.index] = roles.get(choice.index) or choice.delta.role
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        reasons[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(3), reference.text(prompt, 12))
    assert reasons == dict.fromkeys(range(3), "length")
    assert roles == dict.fromkeys(range(3), "assistant")


def test_stream_usage_comes_in_a_chunk_without_choices(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(max_tokens=7, **GREEDY).usage
    chunks = list(
        client.chat.completions.create(
            max_tokens=7, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == 7
    # The first request filled the prefix cache.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("limit", [{"max_tokens": 4}, {"max_completion_tokens": 4}])
def test_token_limit_has_two_names(client: openai.OpenAI, limit: dict[str, int]) -> None:
    assert client.chat.completions.create(**limit, **GREEDY).usage.completion_tokens == 4


def test_content_can_be_a_list_of_texts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a KV cache?"}]
    listed = GREEDY | {"messages": [MESSAGES[0], {"role": "user", "content": parts}]}
    plain = client.chat.completions.create(max_tokens=10, **GREEDY).choices[0].message.content
    assert (
        client.chat.completions.create(max_tokens=10, **listed).choices[0].message.content == plain
    )


def test_last_message_can_be_continued(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[MESSAGES[1], {"role": "assistant", "content": "It is"}],
        temperature=0,
        max_tokens=8,
        extra_body={"ignore_eos": True, "continue_final_message": True},
    )
    prompt = "<|user|>What is a KV cache?<|end|><|assistant|>It is"
    assert answer.choices[0].message.content == reference.text(prompt, 8)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_equal_transformers(
    client: openai.OpenAI, reference: Reference, prompt: str, stream: bool
) -> None:
    options = GREEDY | {"max_tokens": 12, "logprobs": True, "top_logprobs": 5}
    if stream:
        choices = [c.choices[0] for c in client.chat.completions.create(stream=True, **options)]
    else:
        choices = client.chat.completions.create(**options).choices
    given = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    ids, tokens = reference.tokenizer.encode(prompt), list(reference.tokens(prompt, 12))
    expected = checkpoints.logits(reference.model, ids + tokens)[len(ids) - 1 : -1].log_softmax(-1)
    assert len(given) == 12
    for position, entry in enumerate(given):
        chosen = expected[position, tokens[position]].item()
        assert entry.logprob == pytest.approx(chosen, abs=1e-4)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(
            expected[position].topk(5).values.tolist(), abs=1e-4
        )
        # Greedy: the chosen token is the likeliest, and both its log-probabilities are equal.
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.top_logprobs[0].bytes == entry.bytes


def test_logprob_bytes_add_up_to_the_answer(client: openai.OpenAI) -> None:
    """A token with half a character is named by its bytes."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=40,
        seed=2,
        logprobs=True,
        logit_bias={str(checkpoints.EOS): -100},
    ).choices[0]
    entries = answer.logprobs.content
    special = [b for b in map(bytes, (e.bytes for e in entries)) if b.startswith(b"<|")]
    text = b"".join(bytes(e.bytes) for e in entries if bytes(e.bytes) not in special)
    assert text.decode(errors="replace") == answer.message.content
    assert all(e.top_logprobs == [] for e in entries)
    parts = [e for e in entries if e.token.startswith("bytes:")]
    assert parts
    for part in parts:
        assert part.token == "bytes:" + "".join(rf"\x{byte:02x}" for byte in part.bytes)


def test_sampled_logprob_equals_its_top_logprob_exactly(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=40,
        temperature=0.7,
        seed=3,
        logprobs=True,
        top_logprobs=20,
    )
    entries = answer.choices[0].logprobs.content
    found = [
        (e, t) for e in entries for t in e.top_logprobs if t.bytes == e.bytes and t.token == e.token
    ]
    is_equal = [e.logprob == t.logprob for e, t in found]
    assert len(is_equal) >= len(entries) // 2
    assert all(is_equal)
    for entry in entries:
        values = [t.logprob for t in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)


def test_stream_bytes_are_server_sent_events(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
        events = answer.read().split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        assert event.startswith(b"data: {")
        assert json.loads(event[6:])["object"] == "chat.completion.chunk"


def test_seed_repeats_the_answer(client: openai.OpenAI) -> None:
    texts = [
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, seed=seed)
        .choices[0]
        .message.content
        for seed in (4, 4, 5)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_too_long_conversation_is_refused_with_the_limit(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x" * 30_000}]
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)


def test_top_logprobs_are_normalized_over_the_vocabulary(client: openai.OpenAI) -> None:
    """Log-probabilities are not normalized over the reported tokens only."""
    entry = (
        client.chat.completions.create(max_tokens=1, logprobs=True, top_logprobs=100, **GREEDY)
        .choices[0]
        .logprobs.content[0]
    )
    total = torch.tensor([t.logprob for t in entry.top_logprobs]).exp().sum().item()
    assert 0.5 < total < 1.0
