"""Sound in chats, with the official client, compared with the offline engine."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests import asr, hearing
from tests.local import LocalServer
from tests.server import Server
from tests.speech.files import written
from toolkit import LLM, SamplingParams

TOKENS = 8
RATE = hearing.RATE
FIRST, SECOND = (
    (hearing.sound(seed, length) * 2**15).astype(np.int16)
    for seed, length in enumerate((RATE, 2 * RATE))
)
SAMPLING = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asr.save(tmp_path_factory.mktemp("models") / "asr")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    options = "--served-model-name", "tiny", "--num-gpu-blocks-override", "100"
    # Which is for models such as Whisper, and changes nothing here.
    options += ("--transcription-fallback",)
    served = LocalServer(str(folder), *options, cwd=folder.parent)
    yield served
    served.await_health()
    served.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), device="cpu", num_threads=1, num_gpu_blocks_override=100)
    yield made
    made.shutdown()


def part(samples: Any, kind: str = "wav") -> dict[str, Any]:
    data = base64.b64encode(written(samples, RATE)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def user(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def sound(samples: Any) -> dict[str, Any]:
    return {"type": "audio", "audio": (samples, RATE)}


CHATS = [
    (user(part(FIRST)), user(sound(FIRST)), 13),
    (
        user(text("a"), part(SECOND), text("b"), part(FIRST)),
        user(text("a"), sound(SECOND), text("b"), sound(FIRST)),
        39,
    ),
]


@pytest.mark.parametrize(("sent", "same", "num_tokens"), CHATS, ids=["one", "two"])
def test_a_chat_has_the_answer_of_the_engine(client, server, llm, sent, same, num_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    [expected] = llm.chat(same, params, use_tqdm=False)
    more = {"messages": sent, "extra_body": {"ignore_eos": True}}
    done = client.chat.completions.create(**SAMPLING, **more)
    assert done.choices[0].message.content == expected.outputs[0].text
    assert done.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert done.usage.prompt_tokens_details.audio_tokens == num_tokens
    chunks = client.chat.completions.create(**SAMPLING, **more, stream=True)
    streamed = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert streamed == expected.outputs[0].text
    found = httpx.post(f"{server.url}/tokenize", json={"messages": sent}).json()
    assert found["tokens"] == expected.prompt_token_ids


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (user(part(FIRST) | {"input_audio": {"data": "a!", "format": "wav"}}), "base64"),
        (user(part(FIRST) | {"input_audio": {"data": "", "format": "wav"}}), "is empty"),
        (user(part(FIRST) | {"input_audio": {"data": "AAAA", "format": "wav"}}), "sound"),
        (user(part(FIRST[:0])), "without sound"),
        (user(part(np.zeros(25 * RATE, np.int16))), "25.0 s of audio"),
        ([{"role": "system", "content": [part(FIRST)]}], "role 'system'"),
    ],
)
def test_sound_that_cannot_be_read_is_refused(client, message, named):
    with pytest.raises(openai.BadRequestError, match=named) as raised:
        client.chat.completions.create(**SAMPLING, messages=message)
    assert raised.value.param.startswith("messages[0].content[0].input_audio")


@pytest.mark.parametrize("prompt", ["", "Moroni"])
def test_transcriptions_equal_transformers(client, prompt):
    """The language begins the answer, and the prompt is the system's message."""
    text = f"<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n"
    text += "<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    expected = asr.answer(
        asr.reference(),
        asr.tokens(f"{text}language German<asr_text>"),
        [(FIRST / 2**15).astype(np.float32)],
    )
    wishes = {"max_completion_tokens": asr.COUNT, "ignore_eos": True}
    done = client.audio.transcriptions.create(
        model="tiny",
        file=("a.wav", written(FIRST, RATE)),
        language="de",
        prompt=prompt,
        extra_body=wishes,
    )
    assert done.text == asr.spelled(expected).strip()
    assert done.usage.seconds == 1


def test_answers_without_a_language_have_log_probabilities(client):
    """Eight tokens of a model with random weights, which writes none."""
    done = client.audio.transcriptions.create(
        model="tiny",
        file=("a.wav", written(FIRST, RATE)),
        include=["logprobs"],
        extra_body={"max_completion_tokens": TOKENS, "ignore_eos": True},
    )
    assert 0 < len(done.logprobs) <= TOKENS
    assert all(one.logprob < 0 for one in done.logprobs)


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({"prompt": "a" * 225}, "leaves no room for sound"),
        ({"response_format": "srt"}, "must be json or text"),
        ({"language": "la"}, "must be a code"),
        ({"extra_body": {"temperature_fallback": True}}, "such as Whisper"),
        ({"extra_body": {"condition_on_previous_text": True}}, "such as Whisper"),
    ],
)
def test_transcriptions_without_times_refuse_them(client, wishes, named):
    file = ("a.wav", written(FIRST, RATE))
    with pytest.raises(openai.BadRequestError, match=named):
        client.audio.transcriptions.create(model="tiny", file=file, **wishes)


def test_translations_need_another_model(client):
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(model="tiny", file=("a.wav", written(FIRST, RATE)))


def test_the_model_lists_audio(client, server):
    [card] = client.models.list().data
    assert card.input_modalities == ["text", "audio"]
    assert card.tasks == ["generate", "transcription", "chat"]
