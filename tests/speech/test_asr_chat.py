"""Answers that begin with the language that is spoken."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tests.speech.invented import BYTES, FakeModel, Heard, clip_of, number_of
from toolkit.speech.asr_chat import LANGUAGES, ASRChat, language_header
from toolkit.speech.languages import find_language, language_code
from toolkit.speech.transcriber import Transcriber, TranscriptionOptions
from toolkit.speech.transcript import Transcript

MARKER, END = 300, 256
SPELLED = BYTES | {MARKER: b"<asr_text>", END: b""}


def said(language: str, text: str) -> list[int]:
    return [*f"language {language}".encode(), MARKER, *text.encode()]


def run(*answers: list[int], **options):
    """Return (parts of text, transcript, model) of one window for each answer."""

    def reply(heard: Heard) -> tuple[list[int], float]:
        return answers[number_of(heard.clip)], -0.25

    model = FakeModel(reply)
    wishes = TranscriptionOptions(**options)

    async def collect():
        listener = ASRChat(model, [1, 2], MARKER, SPELLED, wishes)
        transcript, texts = Transcript(60.0 * len(answers)), []
        windows = [(60.0 * index, clip_of(60.0, index)) for index in range(len(answers))]
        async with aclosing(Transcriber(listener, wishes).parts(windows, transcript)) as parts:
            texts += [part.text async for part in parts if part.text]
        return texts, transcript

    return *asyncio.run(collect()), model


def test_the_first_window_has_the_language():
    texts, transcript, model = run(said("German", "Grüße."), said("English", "Hello."))
    assert transcript.language == "de"
    assert transcript.text == "".join(texts) == "Grüße. Hello."
    assert [one.prompt for one in model.answers] == [[1, 2], [1, 2]]


def test_languages_without_spaces_are_joined_without():
    _, transcript, _ = run(said("Cantonese", "你好。"), said("Cantonese", "再見。"))
    assert (transcript.language, transcript.text) == ("yue", "你好。再見。")


def test_log_probabilities_are_of_the_text():
    _, transcript, _ = run(said("English", "Yes."), has_logprobs=True)
    [window] = transcript.windows
    assert bytes(window.tokens) == b"Yes."
    assert window.logprobs == [-0.25] * 4


@pytest.mark.parametrize(
    "answer", [said("None", ""), [*b"language None"], [*b"langu"], [*b"language Ger"], []], ids=str
)
def test_silence_and_a_header_that_is_cut_off_are_no_text(answer):
    _, transcript, _ = run(answer, said("German", "Ja."), has_logprobs=True)
    assert (transcript.language, transcript.text) == ("de", "Ja.")
    assert not transcript.windows[0].logprobs


@pytest.mark.parametrize("spoken", ["hello", "language models", "la", "language French, German"])
def test_an_answer_without_a_language_is_text(spoken):
    _, transcript, _ = run([*spoken.encode(), END], said("German", "Ja."), has_logprobs=True)
    is_text = spoken not in ("la", "language French, German")
    assert (transcript.language, transcript.text) == ("de", f"{spoken} Ja." if is_text else "Ja.")
    assert [len(one.tokens) for one in transcript.windows] == [len(spoken) * is_text, 3]
    assert [len(one.logprobs) for one in transcript.windows] == [len(spoken) * is_text, 3]


def test_windows_are_joined_by_their_own_languages():
    texts, transcript, _ = run(
        said("None", ""),
        said("Chinese,English", "你好。"),
        said("Chinese", "再見。"),
        said("English", "Hi there."),
        said("English", "More."),
    )
    assert transcript.language == "zh"
    assert transcript.text == "".join(texts) == "你好。再見。 Hi there. More."


def test_a_given_language_is_not_written():
    _, transcript, _ = run([*b"Ja."], language="de")
    assert (transcript.language, transcript.text) == ("de", "Ja.")


def test_each_language_has_a_name():
    for code in LANGUAGES:
        name = language_header(code).removeprefix("language ")
        assert language_code(name) == find_language(code, LANGUAGES) == code
    assert language_header("tl") == "language Filipino"
