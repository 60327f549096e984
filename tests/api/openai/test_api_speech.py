"""Transcriptions by an engine with a tiny Whisper: its answers are Transformers'."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from tests import checkpoints, hearing
from tests.hearing import ENGLISH, GERMAN, NO_TIMESTAMPS, START, TRANSCRIBE, TRANSLATE
from tests.local import LocalServer
from tests.server import Server, until

COUNT = 20  # tokens of an answer


def wav(*clips: hearing.Samples) -> tuple[str, bytes]:
    """Return a file with the samples of clips, rounded to 16 bits."""
    samples = np.rint(np.concatenate(clips) * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, hearing.RATE, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return "speech.wav", file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = hearing.save(tmp_path_factory.mktemp("models") / "whisper", **hearing.SUPPRESSED)
    running = LocalServer(str(folder), "--dtype", "float32", "--device", "cpu", cwd=folder)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def audio(server: Server) -> openai.resources.Audio:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return client.audio


def ask(route: Any, file: tuple[str, bytes], **fields: Any) -> Any:
    own = {"max_completion_tokens": COUNT, **fields.pop("extra_body", {})}
    return route.create(model="whisper", file=file, extra_body=own, **fields)


def answer(clip: hearing.Samples, *prompt: int) -> list[int]:
    """Return Transformers' tokens, to the end."""
    tokens = hearing.answer(hearing.reference(), clip, prompt, COUNT)
    return tokens[: tokens.index(hearing.END)] if hearing.END in tokens else tokens


def text_of(tokens: Sequence[int]) -> str:
    text = [token for token in tokens if token < hearing.END]
    return checkpoints.make_tokenizer().decode(text).strip()


def test_text_is_that_of_transformers(audio):
    clip = hearing.sound(0)
    found = ask(audio.transcriptions, wav(clip), language="en")
    assert found.text == text_of(answer(clip, START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS))


def test_segments_have_the_tokens_of_transformers(audio):
    clip = hearing.sound(1, 9001)
    found = ask(audio.transcriptions, wav(clip), language="de", response_format="verbose_json")
    expected = answer(clip, START, GERMAN, TRANSCRIBE)
    tokens = [token for segment in found.segments for token in segment.tokens]
    assert [one for one in tokens if one < hearing.END] == [
        one for one in expected if one < hearing.END
    ]
    assert found.language == "german"
    assert all(0 <= one.start <= one.end <= 0.563 for one in found.segments)
    assert all(one.avg_logprob < 0 < one.no_speech_prob < 1 for one in found.segments)


def test_translations_are_those_of_transformers(audio):
    clip = hearing.sound(3)
    found = ask(
        audio.translations,
        wav(clip),
        response_format="verbose_json",
        extra_body={"language": "en"},
    )
    expected = text_of(answer(clip, START, ENGLISH, TRANSLATE))
    assert found.text.startswith(expected)  # a phrase that is cut off may follow


def test_words_are_those_of_the_text(audio):
    file = wav(hearing.sound(0), hearing.sound(1))
    asked = {"language": "en", "response_format": "verbose_json"}
    found = ask(audio.transcriptions, file, timestamp_granularities=["word"], **asked)
    assert found.segments is None
    assert found.words
    assert "".join(one.word for one in found.words) == "".join(found.text.split())
    assert all(0 <= one.start <= one.end <= 2 for one in found.words)
    both = ask(audio.transcriptions, file, timestamp_granularities=["word", "segment"], **asked)
    assert both.words == found.words
    assert both.segments


def test_languages_are_detected(audio):
    found = ask(audio.transcriptions, wav(hearing.sound(0)), response_format="verbose_json")
    assert found.language in ("english", "german")


def test_streams_of_long_sound_have_the_same_text(server, audio):
    """Windows have one second, cut where it is quiet."""
    file = wav(*(hearing.sound(seed) for seed in range(5)))
    complete = ask(audio.transcriptions, file, language="en").text
    *deltas, done = ask(audio.transcriptions, file, language="en", stream=True)
    assert "".join(one.delta for one in deltas) == done.text == complete
    assert done.usage.seconds == 5
    until(server.is_idle)


def test_special_tokens_in_a_prompt_are_left_out(audio):
    """With the end in the text before it, a model answers nothing, or anything."""
    file = wav(hearing.sound(5))
    expected, found = (
        ask(audio.transcriptions, file, language="en", prompt=prompt).text
        for prompt in ("Hi you", "Hi<|endoftext|> <|0.20|><|notimestamps|>you<|de|>")
    )
    assert found == expected


def test_a_window_that_the_operator_ends_ends_the_transcript(server, audio):
    """The text without it would have a gap."""
    file = wav(*(hearing.sound(seed) for seed in range(30, 33)))
    with server.slowly(), ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, audio.transcriptions, file, language="en")
        live = until(lambda: server.http.get("/tk/requests").json()["requests"])
        assert server.http.delete(f"/tk/requests/{live[-1]['id']}").status_code == 200
        with pytest.raises(openai.InternalServerError, match="ended by the server's operator"):
            asked.result()
    until(server.is_idle)


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/api/chat", {"model": "whisper", "messages": MESSAGES}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/rerank", {"query": "Hi", "documents": ["Hi"]}),
    ],
)
def test_text_prompts_are_refused(server, path, body):
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400
    assert "transcribes sound" in reply.text
    assert "/v1/audio/transcriptions" in reply.text
