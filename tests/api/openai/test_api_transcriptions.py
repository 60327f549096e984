"""/v1/audio/transcriptions and translations, with the official client and an invented model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.speech.invented import ENGLISH, FakeModel, Heard, spelled
from tests.speech.served import Served, wav
from toolkit.speech.tokens import HearingInfo


def reply(heard: Heard) -> tuple[list[int], float]:
    has_times = heard.prompt[-1] != 265
    return spelled(0.0, " Hi there.", 1.5, 1.5, " Bye.", 2.0) if has_times else spelled(
        " Hi there. Bye."
    ), -0.25


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(FakeModel(reply))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def unheard(served: Served) -> None:
    served.engine.model.heard.clear()


def ask(served: Served, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with served.client() as client:
            return await work(client)

    return asyncio.run(run())


def create(served: Served, seconds: float = 2.0, **fields: Any) -> Any:
    """Return the transcription of a file, as the official client reads it."""
    file = ("speech.wav", wav(seconds))
    return ask(
        served, lambda one: one.audio.transcriptions.create(model="tiny", file=file, **fields)
    )


def post(
    served: Served, path: str = "transcriptions", file: bytes | None = None, **fields: Any
) -> httpx.Response:
    """Send a form as browsers do."""

    async def run() -> httpx.Response:
        async with served.http() as http:
            files = {"file": ("a.wav", wav(2.0) if file is None else file)}
            return await http.post(f"/v1/audio/{path}", data=fields, files=files)

    return asyncio.run(run())


def test_json_has_text_and_usage(served):
    registry = served.engine.metrics.registry
    counted = "tk:audio_seconds_total", {"model_name": "tiny", "engine": "0"}
    before = registry.get_sample_value(*counted)
    found = create(served, language="en")
    assert registry.get_sample_value(*counted) == before + 2.0
    assert found.text == "Hi there. Bye."
    assert (found.usage.type, found.usage.seconds) == ("duration", 2)
    [heard] = served.engine.model.heard
    assert heard.prompt == [257, 258, 262, 265]
    assert heard.params.temperature == 0.0
    assert heard.clip.seconds == 2.0
    assert served.engine.ids[-1].startswith("transcr-")


def test_long_sound_is_windows_in_order(served):
    found = create(served, 65.0, language="en")
    assert found.text == "Hi there. Bye. Hi there. Bye. Hi there. Bye."
    assert found.usage.seconds == 65


def test_verbose_json_has_segments(served):
    found = create(served, 35.0, response_format="verbose_json")
    assert (found.language, found.duration, found.task) == ("german", 35.0, "transcribe")
    assert [one.text for one in found.segments] == [" Hi there.", " Bye."] * 2
    assert [one.id for one in found.segments] == [0, 1, 2, 3]
    first, later = found.segments[0], found.segments[2]
    assert (first.start, first.end, first.seek) == (0.0, 1.5, 0)
    assert later.seek == round(later.start * 100) > 2900
    assert first.avg_logprob == -0.25
    assert 0 < first.no_speech_prob < 1e-4


@pytest.mark.parametrize(
    ("response_format", "kind", "beginning"),
    [
        ("text", "text/plain; charset=utf-8", "Hi there. Bye.\n"),
        ("srt", "application/x-subrip", "1\n00:00:00,000 --> 00:00:01,500\nHi there.\n\n2\n"),
        ("vtt", "text/vtt; charset=utf-8", "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHi there.\n"),
    ],
)
def test_text_and_subtitles_are_plain(served, response_format, kind, beginning):
    assert create(served, language="en", response_format=response_format).startswith(beginning)
    answer = post(served, response_format=response_format)
    assert answer.headers["content-type"] == kind


def test_translations_are_english(served):
    file = ("speech.wav", wav(2.0))
    found = ask(
        served,
        lambda one: one.audio.translations.create(
            model="tiny", file=file, response_format="verbose_json", extra_body={"language": "de"}
        ),
    )
    assert (found.language, found.text) == ("english", "Hi there. Bye.")
    assert served.engine.model.answers[0].prompt == [257, 259, 261]


def test_prompt_temperature_and_seed_reach_the_engine(served):
    create(served, language="en", prompt=" Dr. Who ", temperature=0.5, extra_body={"seed": 7})
    [heard] = served.engine.model.heard
    assert heard.prompt == [263, *b" Dr. Who", 257, 258, 262, 265]
    assert (heard.params.temperature, heard.params.seed) == (0.5, 7)


def test_streams_have_the_events_of_openai(served):
    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.audio.transcriptions.create(
            model="tiny", file=("a.wav", wav(35.0)), language="en", stream=True
        )
        return [one async for one in stream]

    *deltas, done = ask(served, work)
    assert {one.type for one in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 10
    assert "".join(one.delta for one in deltas) == done.text == "Hi there. Bye. Hi there. Bye."
    assert done.type == "transcript.text.done"
    assert done.usage.seconds == 35


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    *found, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in found]


def test_streams_report_their_progress(served):
    found = events(
        post(
            served,
            file=wav(35.0),
            language="en",
            stream="true",
            stream_continuous_usage_stats="true",
            response_format="verbose_json",
        )
    )
    usages = [one["usage"] for one in found[:-1]]
    assert {one["total_seconds"] for one in usages} == {35.0}
    seconds = sorted({one["seconds"] for one in usages})
    assert seconds[0] == 0.0
    assert seconds[-1] == 35.0
    assert len(seconds) > 3, "windows count before they end"
    tokens = [one["completion_tokens"] for one in usages]
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (0, 2 * len(reply(served.engine.model.answers[0])[0]) + 2)
    assert len(found[-1]["segments"]) == 4


def test_logprobs_are_reported_if_included(served):
    found = create(served, language="en", include=["logprobs"])
    assert "".join(one.token for one in found.logprobs) == " Hi there. Bye."
    assert found.logprobs[0].bytes == [32]
    assert {one.logprob for one in found.logprobs} == {-0.25}
    streamed = events(post(served, **{"include[]": "logprobs", "stream": "1", "language": "en"}))
    assert streamed[-1]["logprobs"] == [one.model_dump() for one in found.logprobs]
    assert [one for part in streamed[:-1] for one in part.get("logprobs", [])] == (
        streamed[-1]["logprobs"]
    )


def test_empty_fields_are_left_out(served):
    answer = post(served, language="", prompt="", temperature="", response_format="")
    assert answer.json()["text"] == "Hi there. Bye."


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "xx"}, "language", "must be a code of ISO 639-1"),
        ({"response_format": "docx"}, "response_format", "must be one of 'json', 'text'"),
        ({"temperature": "1.5"}, "temperature", "must be at most 1"),
        ({"temperature": "warm"}, "temperature", "must be a number"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "page"}, "timestamp_granularities[0]", "must be one of"),
        ({"include[]": "logprobs", "response_format": "srt"}, "include", "needs response_format"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "in a stream"),
        ({"stream_continuous_usage_stats": "true"}, "stream_continuous_usage_stats", "stream"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "must be auto"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "must be auto"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names", "do not distinguish speakers"),
        ({"language": ["en", "de"]}, "language", "twice"),
        ({"model": "other"}, "model", "is not served here"),
    ],
)
def test_wrong_fields_are_refused(served, fields, param, message):
    answer = post(served, **fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_unknown_fields_are_named(served):
    answer = post(served, vad_filter="true", chunking_strategy="auto")
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "vad_filter"


def test_strict_servers_refuse_unknown_fields():
    strict = Served(FakeModel(reply), strict=True)
    answer = post(strict, vad_filter="true")
    strict.close()
    assert answer.json()["error"]["param"] == "vad_filter"


def test_models_that_do_not_hear_say_so():
    deaf = Served(FakeModel(reply), hearing=None)
    answer = post(deaf)
    deaf.close()
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "model_not_supported"
    assert "tiny does not hear" in answer.json()["error"]["message"]


def test_models_that_only_chat_about_sound_say_so():
    chatty = Served(FakeModel(reply), hearing=None)
    chatty.engine.info.sound = object()
    answer = post(chatty)
    chatty.close()
    assert answer.status_code == 400
    assert "as input_audio" in answer.json()["error"]["message"]


def test_a_language_that_is_auto_is_detected(served):
    answer = post(served, language="auto", response_format="verbose_json")
    assert answer.json()["language"] == "german"


def test_english_models_do_not_translate():
    english = Served(FakeModel(reply), hearing=HearingInfo(tokens=ENGLISH))
    answer = post(english, "translations")
    english.close()
    assert answer.status_code == 400
    assert "cannot translate" in answer.json()["error"]["message"]


def test_fallback_is_the_servers_unless_the_request_says():
    model = FakeModel(lambda heard: (spelled(" Thanks."), -1.5), no_speech_logprob=-0.1)
    falling = Served(model, transcription_fallback=True)
    assert post(falling, language="en").json()["text"] == ""
    answer = post(falling, language="en", temperature_fallback="false")
    falling.close()
    assert answer.json()["text"] == "Thanks."


def test_transcriptions_have_a_time_limit(served):
    """All windows share it."""
    limited = Served(FakeModel(reply, pause=0.02), request_timeout=0.05)
    answer, stream = post(limited), post(limited, stream="true", language="en")
    limited.close()
    assert answer.status_code == 504
    assert "within 0.05 s" in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")
    assert limited.engine.model.num_running == 0


def test_files_that_are_no_sound_are_refused(served):
    answer = post(served, file=b"hello, this is text")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"


def test_a_full_queue_refuses_a_transcription():
    full = Served(FakeModel(reply), max_queue=1)
    full.engine.num_waiting = 1
    answer = post(full)
    full.close()
    assert answer.status_code == 429


def test_a_short_queue_takes_a_long_file():
    """Its windows are more answers than can run and wait: fewer run at once."""
    model = FakeModel(reply, pause=0.001)
    short = Served(model, max_queue=2)
    short.engine.max_num_running = 1
    answer = post(short, file=wav(155.0), language="en")
    short.close()
    assert answer.status_code == 200
    assert answer.json()["text"].count("Bye.") == 6
    assert 1 < model.most_running <= 3


def test_disconnecting_ends_all_windows(served):
    """The client leaves while the text of the first window is sent."""
    model = served.engine.model
    body = httpx.Request(
        "POST",
        "http://127.0.0.1",
        data={"stream": "true", "language": "en"},
        files={"file": ("a.wav", wav(95.0))},
    )
    scope = {
        "type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "query_string": b"",
        "headers": [(name.lower(), value) for name, value in body.headers.raw],
        "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http", "root_path": "",
        "server": ("127.0.0.1", 8000),
    }  # fmt: skip

    async def run() -> None:
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": body.read(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if b"delta" in message.get("body", b""):
                left.set()

        await served.app(scope, receive, send)

    asyncio.run(run())
    assert len(model.answers) == 4
    assert all(one.is_closed for one in model.answers)
    assert model.num_running == 0


def test_models_that_hear_are_listed_with_their_task(served):
    async def work(client: openai.AsyncOpenAI) -> Any:
        return await client.models.retrieve("tiny")

    card = ask(served, work)
    assert (card.tasks, card.input_modalities) == (["transcription"], ["text", "audio"])


def test_openapi_describes_the_form(served):
    async def run() -> Any:
        async with served.http() as http:
            return (await http.get("/openapi.json")).json()

    route = asyncio.run(run())["paths"]["/v1/audio/transcriptions"]["post"]
    form = route["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file"]
    assert form["properties"]["timestamp_granularities[]"]["type"] == "array"
    assert msgspec.json.encode(form)
