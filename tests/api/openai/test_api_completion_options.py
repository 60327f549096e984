"""Options of /v1/completions, with the official client."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest
import torch

from tests import checkpoints
from tests.api.conftest import CONTEXT, Reference
from tests.server import WAIT, Server, until

PROMPT = "The sea is"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


def forever(**more: object) -> dict[str, Any]:
    """Parameters that OpenAI does not have, so that an answer ends only at max_tokens."""
    return {"ignore_eos": True, **more}


def logprobs_of(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: log-probabilities of the token after each."""
    return checkpoints.logits(reference.model, tokens).log_softmax(-1)


# ---- echo


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(
    client: openai.OpenAI, reference: Reference, stream: bool
) -> None:
    answer = client.completions.create(
        prompt=PROMPT, max_tokens=8, echo=True, stream=stream, extra_body=forever(), **GREEDY
    )
    parts = list(answer) if stream else [answer]
    text = "".join(part.choices[0].text for part in parts)
    assert text == PROMPT + reference.text(PROMPT, 8)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_several_prompts_matches_each_choice(
    client: openai.OpenAI, reference: Reference, stream: bool
) -> None:
    prompts = ["first", "the second one"]
    answer = client.completions.create(
        prompt=prompts,
        n=2,
        max_tokens=6,
        echo=True,
        logprobs=1,
        stream=stream,
        extra_body=forever(),
        **GREEDY,
    )
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [p + reference.text(p, 6) for p in prompts for _ in range(2)]
    assert [len(one) for one in tokens] == [len(p) + 6 for p in prompts for _ in range(2)]


def test_echo_of_token_ids_is_their_text(client: openai.OpenAI, reference: Reference) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    answer = client.completions.create(
        prompt=ids, max_tokens=1, echo=True, extra_body=forever(), **GREEDY
    )
    assert answer.choices[0].text == PROMPT + reference.text(PROMPT, 1)


def test_echoed_prompt_logprobs_equal_transformers(
    client: openai.OpenAI, reference: Reference
) -> None:
    answer = client.completions.create(
        prompt=PROMPT, max_tokens=4, echo=True, logprobs=2, extra_body=forever(), **GREEDY
    )
    ids = [*reference.tokenizer.encode(PROMPT), *reference.tokens(PROMPT, 4)]
    expected = logprobs_of(reference, ids)
    given = answer.choices[0].logprobs
    assert len(given.tokens) == len(given.top_logprobs) == len(given.text_offset) == len(ids)
    assert (given.token_logprobs[0], given.top_logprobs[0]) == (None, None)
    for position in range(1, len(ids)):
        assert given.token_logprobs[position] == pytest.approx(
            expected[position - 1, ids[position]].item(), abs=1e-4
        )
    assert given.tokens[: len(PROMPT)] == list(PROMPT)
    assert given.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_index_the_text_and_keys_differ(client: openai.OpenAI, stream: bool) -> None:
    answer = client.completions.create(
        prompt="東京 tk", max_tokens=24, echo=True, logprobs=100, stream=stream,
        extra_body=forever(), **GREEDY,
    )  # fmt: skip
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    text = "".join(part.text for part in parts)
    given = [part.logprobs for part in parts if part.logprobs]
    tokens = [token for one in given for token in one.tokens]
    offsets = [offset for one in given for offset in one.text_offset]
    assert tokens[:7] == [*(rf"bytes:\x{byte:02x}" for byte in "東京".encode()), " "]
    assert offsets[:9] == [0, 0, 0, 1, 1, 1, 2, 3, 4]
    for token, offset in zip(tokens, offsets, strict=True):
        is_shown = not token.startswith("bytes:") and not token.startswith("<|")
        assert not is_shown or text[offset:].startswith(token), token
    for likeliest in [top for one in given for top in one.top_logprobs[1:] if top]:
        assert len(likeliest) in (100, 101)
        assert [*likeliest.values()] == sorted(likeliest.values(), reverse=True)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_a_stop_string_are_the_end_of_the_text(
    client: openai.OpenAI, stream: bool
) -> None:
    answer = client.completions.create(
        prompt=PROMPT, max_tokens=9, logprobs=0, stop="def", stream=stream,
        extra_body={"structured_outputs": {"choice": ["abcdefgh"]}}, **GREEDY,
    )  # fmt: skip
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(part.text for part in parts) == "abc"
    offsets = [at for part in parts if part.logprobs for at in part.logprobs.text_offset]
    assert offsets[:4] == [0, 1, 2, 3]
    assert offsets[4 if not stream else -1 :] == [3] * (2 if not stream else 1)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_with_echo_scores_only_the_prompt(
    client: openai.OpenAI, reference: Reference, stream: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(
        prompt=PROMPT, max_tokens=0, echo=True, logprobs=0, stream=stream, **options, **GREEDY
    )
    parts = list(answer) if stream else [answer]
    choices = [part.choices[0] for part in parts if part.choices]
    assert "".join(c.text for c in choices) == PROMPT
    assert choices[-1].finish_reason == "length"
    scores = [value for c in choices if c.logprobs for value in c.logprobs.token_logprobs]
    ids = reference.tokenizer.encode(PROMPT)
    expected = logprobs_of(reference, ids)
    wanted = sum(expected[i, ids[i + 1]].item() for i in range(len(ids) - 1))
    assert sum(scores[1:]) == pytest.approx(wanted, abs=1e-3)
    usage = parts[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 0)


def test_max_tokens_0_without_echo_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=0)


# ---- several answers


def test_best_of_returns_the_likeliest_answers(client: openai.OpenAI, reference: Reference) -> None:
    common = {"prompt": PROMPT, "max_tokens": 5, "seed": 7, "temperature": 1.0, "model": "tiny"}
    answers = client.completions.create(n=6, logprobs=0, extra_body=forever(), **common)
    sums = {sum(c.logprobs.token_logprobs): c.text for c in answers.choices}
    best = client.completions.create(n=2, best_of=6, extra_body=forever(), **common)
    assert [c.text for c in best.choices] == [sums[key] for key in sorted(sums, reverse=True)[:2]]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 6 * 5


@pytest.mark.parametrize(
    "option", [{"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}, {"best_of": 200}]
)
def test_invalid_best_of_is_refused(client: openai.OpenAI, option: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", max_tokens=2, **option)


def test_beam_search_equals_transformers(client: openai.OpenAI, reference: Reference) -> None:
    prompts, model = [PROMPT, "another"], checkpoints.make_reference("llama3-gqa").module
    answer = client.completions.create(
        prompt=prompts,
        n=2,
        best_of=3,
        max_tokens=6,
        extra_body=forever(use_beam_search=True, length_penalty=0.5, early_stopping=True),
        **GREEDY,
    )
    expected = []
    for prompt in prompts:
        ids = torch.tensor([reference.tokenizer.encode(prompt)])
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=2,
                max_new_tokens=6, length_penalty=0.5, early_stopping=True, do_sample=False,
                eos_token_id=checkpoints.VOCAB + 1, pad_token_id=0,
            )  # fmt: skip
        expected += [
            reference.tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True)
            for row in found
        ]
    assert [c.text for c in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_beam_logprobs_equal_those_of_the_scored_text(client: openai.OpenAI) -> None:
    beams = client.completions.create(
        prompt=PROMPT, n=2, best_of=4, max_tokens=6, logprobs=2,
        extra_body=forever(use_beam_search=True, return_token_ids=True), **GREEDY,
    )  # fmt: skip
    assert beams.usage.completion_tokens == 12
    for choice in beams.choices:
        scored = client.completions.create(
            prompt=choice.prompt_token_ids + choice.token_ids, echo=True, max_tokens=0, logprobs=2,
            **GREEDY,
        )  # fmt: skip
        found, wanted = choice.logprobs, scored.choices[0].logprobs
        assert found.tokens == wanted.tokens[-6:]
        assert found.token_logprobs == pytest.approx(wanted.token_logprobs[-6:], abs=1e-4)
        for top, expected in zip(found.top_logprobs, wanted.top_logprobs[-6:], strict=True):
            assert top == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "option",
    [
        {"prompt_logprobs": 1}, {"stream": True}, {"echo": True}, {"temperature": 0.5},
        {"stop": "x"}, {"best_of": 99}, {"stop_token_ids": [10**6]}, {"skip_special_tokens": False},
        {"spaces_between_special_tokens": True},
    ],
)  # fmt: skip
def test_beam_search_refuses_unsupported_options(
    client: openai.OpenAI, option: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(option))):
        client.completions.create(
            prompt="a", max_tokens=2, model="tiny", extra_body={"use_beam_search": True} | option
        )


# ---- which tokens


def test_allowed_token_ids_limit_the_answer(client: openai.OpenAI, reference: Reference) -> None:
    allowed = [reference.tokenizer.encode(c)[0] for c in "abc"]
    answer = client.completions.create(
        prompt=PROMPT,
        max_tokens=24,
        model="tiny",
        seed=1,
        extra_body={"allowed_token_ids": allowed},
    )
    assert set(answer.choices[0].text) <= set("abc")
    assert len(answer.choices[0].text) == 24


def test_greedy_picks_the_likeliest_allowed_token(
    client: openai.OpenAI, reference: Reference
) -> None:
    allowed = [5, 60, 90, 200]
    ids = reference.tokenizer.encode(PROMPT)
    for _ in range(6):
        scores = logprobs_of(reference, ids)[-1]
        ids.append(max(allowed, key=lambda token: scores[token].item()))
    answer = client.completions.create(
        prompt=PROMPT,
        max_tokens=6,
        extra_body={"allowed_token_ids": allowed, "return_token_ids": True},
        **GREEDY,
    )
    assert answer.choices[0].token_ids == ids[-6:]


def test_bad_words_are_avoided(client: openai.OpenAI, reference: Reference) -> None:
    """Each bad word comes from the answer without it, so it has an effect."""
    bad: list[str] = []
    for _ in range(4):
        text = (
            client.completions.create(
                prompt="Once", max_tokens=48, extra_body=forever(bad_words=bad), **GREEDY
            )
            .choices[0]
            .text
        )
        assert not any(word in text for word in bad)
        ascii_runs = [text[i : i + 2] for i in range(len(text) - 1) if text[i : i + 2].isascii()]
        bad.append(ascii_runs[0])
    assert len(set(bad)) == 4


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [262]}, "allowed_token_ids"),
        ({"allowed_token_ids": [checkpoints.EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [ord("A")], "bad_words_token_ids": 1}, None),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 300}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": ["a"] * 100, "n": 20, "use_beam_search": True}, "best_of"),
    ],
)
def test_invalid_option_is_refused_by_name(
    http: httpx.Client, option: dict[str, Any], param: str | None
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | option)
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


# ---- the prompt


def test_truncation_keeps_the_end_of_the_prompt(
    client: openai.OpenAI, reference: Reference
) -> None:
    answer = client.completions.create(
        prompt="x" * 50 + PROMPT,
        max_tokens=6,
        echo=True,
        extra_body=forever(truncate_prompt_tokens=len(PROMPT)),
        **GREEDY,
    )
    assert answer.choices[0].text == PROMPT + reference.text(PROMPT, 6)
    assert answer.usage.prompt_tokens == len(PROMPT)


def test_truncation_minus_1_leaves_room_for_the_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt="x" * (CONTEXT + 100),
        max_tokens=3,
        extra_body=forever(truncate_prompt_tokens=-1),
        **GREEDY,
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CONTEXT - 3, 3)


def test_chat_prompt_is_truncated_too(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "x" * 500}],
        max_tokens=2,
        extra_body=forever(truncate_prompt_tokens=40),
        **GREEDY,
    )
    assert answer.usage.prompt_tokens == 40


# ---- the reply


@pytest.mark.parametrize("penalty", [1e4, 1e300])
def test_a_huge_repetition_penalty_forbids_repeats(client: openai.OpenAI, penalty: float) -> None:
    extra = forever(repetition_penalty=penalty, return_token_ids=True)
    answer = client.completions.create(prompt=PROMPT, max_tokens=40, extra_body=extra, **GREEDY)
    [choice] = answer.choices
    tokens = [*set(choice.prompt_token_ids), *choice.token_ids]
    assert len(set(tokens)) == len(tokens)


def test_logprobs_name_tokens_by_id_on_request(client: openai.OpenAI) -> None:
    extra = forever(return_tokens_as_token_ids=True, return_token_ids=True)
    asked: dict[str, Any] = {"max_tokens": 3, "extra_body": extra, **GREEDY}
    [choice] = client.completions.create(prompt=PROMPT, logprobs=2, **asked).choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    messages: Any = [{"role": "user", "content": PROMPT}]
    [chat] = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=1, **asked
    ).choices
    names = [one.token for one in chat.logprobs.content]
    assert names == [f"token_id:{token}" for token in chat.token_ids]
    assert names == [one.top_logprobs[0].token for one in chat.logprobs.content]


def test_fingerprint_is_that_of_the_server(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 1, **GREEDY}
    messages: Any = [{"role": "user", "content": PROMPT}]
    answers = [
        client.completions.create(prompt=PROMPT, **asked),
        client.chat.completions.create(messages=messages, **asked),
        *client.chat.completions.create(messages=messages, stream=True, **asked),
    ]
    [fingerprint] = {answer.system_fingerprint for answer in answers}
    assert fingerprint.startswith("fp_")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_on_request(
    client: openai.OpenAI, reference: Reference, stream: bool
) -> None:
    answer = client.completions.create(
        prompt=PROMPT,
        max_tokens=9,
        stream=stream,
        extra_body=forever(return_token_ids=True),
        **GREEDY,
    )
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    assert choices[0].prompt_token_ids == reference.tokenizer.encode(PROMPT)
    assert [token for c in choices for token in c.token_ids] == list(reference.tokens(PROMPT, 9))


def test_stream_can_report_usage_in_every_event(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            prompt=PROMPT,
            max_tokens=9,
            stream=True,
            stream_options=options,
            extra_body=forever(),
            **GREEDY,
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 9
    assert all(chunk.usage.prompt_tokens == len(PROMPT) for chunk in chunks)


def test_special_tokens_are_spaced_on_request(client: openai.OpenAI, reference: Reference) -> None:
    """Only special tokens are allowed."""
    special = [257, 258, 259]
    common = {"prompt": PROMPT, "max_tokens": 6, "model": "tiny", "seed": 3}
    more = {"allowed_token_ids": special, "skip_special_tokens": False, "return_token_ids": True}
    tight = client.completions.create(extra_body=more, **common).choices[0]
    spaced = client.completions.create(
        extra_body=more | {"spaces_between_special_tokens": True}, **common
    ).choices[0]
    names = reference.tokenizer.convert_ids_to_tokens(tight.token_ids)
    assert tight.text == "".join(names)
    assert spaced.text == " ".join(names)


def test_seed_repeats_n_answers(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, n=3, seed=11)
        return [c.text for c in answer.choices]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_greedy_logprobs_sum_equals_transformers(
    client: openai.OpenAI, reference: Reference
) -> None:
    answer = client.completions.create(
        prompt=PROMPT, max_tokens=8, logprobs=0, extra_body=forever(), **GREEDY
    )
    ids = [*reference.tokenizer.encode(PROMPT), *reference.tokens(PROMPT, 8)]
    scores = logprobs_of(reference, ids)
    wanted = sum(scores[i - 1, ids[i]].item() for i in range(len(PROMPT), len(ids)))
    assert math.fsum(answer.choices[0].logprobs.token_logprobs) == pytest.approx(wanted, abs=1e-3)


def test_beam_search_ends_with_its_client(server: Server) -> None:
    body = {
        "prompt": [5] * 100,
        "best_of": 20,
        "max_tokens": 2000,
        "use_beam_search": True,
        "ignore_eos": True,
    }
    impatient = httpx.Timeout(WAIT, read=0.8)
    with server.slowly():
        with (
            httpx.Client(base_url=server.url, timeout=impatient) as http,
            pytest.raises(httpx.ReadTimeout),
        ):
            http.post("/v1/completions", json=body)
        until(server.is_idle)
