"""Windows through a model: order, prompts, fallback, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from tests.speech.invented import (
    BYTES,
    ENGLISH,
    HEARING,
    FakeModel,
    Heard,
    clip_of,
    number_of,
    spelled,
)
from toolkit.errors import InvalidRequestError
from toolkit.speech.segments import Segment
from toolkit.speech.tokens import HearingInfo
from toolkit.speech.transcriber import MAX_RUNNING, Transcriber, TranscriptionOptions
from toolkit.speech.transcript import Transcript, WindowText
from toolkit.speech.whisper import Whisper

NAMES = ["One", "Two", "Three", "Four", "Five"]


def named(heard: Heard) -> tuple[list[int], float]:
    return spelled(f" {NAMES[number_of(heard.clip)]}."), -0.25


def windows(count: int, seconds: float = 29.5):
    return [(seconds * index, clip_of(seconds, index)) for index in range(count)]


def times(found: Sequence[WindowText | Segment]) -> list[tuple[float, float]]:
    return [(round(one.start, 3), round(one.end, 3)) for one in found]


def transcriber(model: FakeModel, aligner=None, hearing=HEARING, **options) -> Transcriber:
    wishes = TranscriptionOptions(**options)
    return Transcriber(Whisper(model, hearing, BYTES, 448, wishes, aligner), wishes)


def run(model: FakeModel, count: int = 3, aligner=None, most_running: int = MAX_RUNNING, **options):
    """Return (parts of text, transcript)."""

    async def collect():
        made = transcriber(model, aligner, **options)
        transcript, texts = Transcript(29.5 * count), []
        async with aclosing(made.parts(windows(count), transcript, most_running)) as parts:
            texts += [part.text async for part in parts]
        return texts, transcript

    return asyncio.run(collect())


def test_windows_run_together_and_are_joined_in_order():
    model = FakeModel(named)
    texts, transcript = run(model, 5, language="en")
    assert transcript.text == "One. Two. Three. Four. Five."
    assert "".join(texts) == transcript.text
    assert model.most_running == 5
    assert [one.start for one in transcript.windows] == [0.0, 29.5, 59.0, 88.5, 118.0]
    assert transcript.windows[-1].end == 147.5
    assert {tuple(one.prompt) for one in model.answers} == {(257, 258, 262, 265)}


def test_few_windows_run_at_once():
    model = FakeModel(named)
    found = run(model, 5, most_running=2, language="en")[1]
    assert found.text == "One. Two. Three. Four. Five."
    assert model.most_running == 2


@pytest.mark.parametrize(
    ("language", "texts", "expected"),
    [
        ("en", ["One", "two "], "One two"),
        ("en", [" One ", " two"], "One  two"),
        ("en", ["", " One"], "One"),
        ("ja", ["一", "二"], "一二"),
    ],
)
def test_texts_of_windows_have_spaces_where_needed(language, texts, expected):
    model = FakeModel(lambda heard: (spelled(texts[number_of(heard.clip)]), -0.1))
    parts, transcript = run(model, 2, language=language)
    assert transcript.text == expected
    assert "".join(parts) == expected


def test_language_is_detected_in_the_first_window():
    model = FakeModel(named)
    _, transcript = run(model, 2)
    assert transcript.language == "de"
    first = model.heard[0]
    assert first.prompt == [257]
    assert first.params.allowed_token_ids == [258, 259, 260]
    assert [one.prompt for one in model.answers] == [[257, 259, 262, 265]] * 2


def test_translations_are_english():
    model = FakeModel(named)
    _, transcript = run(model, 1, task="translate")
    assert (transcript.language, transcript.task) == ("en", "translate")
    assert model.answers[0].prompt == [257, 259, 261, 265]


def test_english_models_do_not_translate():
    hearing = HearingInfo(tokens=ENGLISH)
    with pytest.raises(InvalidRequestError, match="cannot translate"):
        transcriber(FakeModel(named), hearing=hearing, task="translate")


def test_prompt_is_before_each_window_and_is_cut():
    model = FakeModel(named)
    run(model, 2, language="en", prompt=list(range(100)) * 3)
    previous = (list(range(100)) * 3)[-223:]
    assert [one.prompt for one in model.answers] == [[263, *previous, 257, 258, 262, 265]] * 2


def test_previous_text_is_before_later_windows():
    model = FakeModel(named)
    run(model, 3, language="en", prompt=[7], follows_previous=True)
    assert model.most_running == 1
    assert [one.prompt[:-4] for one in model.answers] == [
        [263, 7],
        [263, 7, *spelled(" One.")],
        [263, 7, *spelled(" One. Two.")],
    ]


def test_timestamps_give_segments_of_the_file():
    model = FakeModel(lambda heard: (spelled(0.0, " A.", 2.0, 2.0, " B.", 4.0), -0.5))
    _, transcript = run(model, 2, language="en", has_timestamps=True, has_scores=True)
    found = [(one.start, one.end, one.text) for one in transcript.segments]
    assert found == [(0, 2, " A."), (2, 4, " B."), (29.5, 31.5, " A."), (31.5, 33.5, " B.")]
    assert transcript.text == "A. B. A. B."
    scores = transcript.windows[0].scores
    assert scores.avg_logprob == pytest.approx(-0.5)
    assert scores.no_speech_prob == pytest.approx(4.54e-5, rel=1e-3)
    assert model.answers[0].prompt == [257, 258, 262]


def test_a_phrase_that_a_window_cuts_off_is_in_a_window_of_its_own():
    def reply(heard: Heard) -> tuple[list[int], float]:
        if heard.clip.seconds > 10:
            return spelled(0.0, " One.", 20.0, 20.4), -0.5
        return spelled(0.0, " Two.", 30.0, 30.0), -0.5  # its last pair is after the end

    model = FakeModel(reply)
    _, transcript = run(model, 2, language="en", has_timestamps=True, has_scores=True)
    assert transcript.text == "One. Two. One. Two."
    assert times(transcript.windows) == [
        (0.0, 20.4), (20.4, 29.5), (29.5, 49.9), (49.9, 59.0),
    ]  # fmt: skip
    assert times(transcript.segments) == [
        (0.0, 20.0), (20.4, 29.5), (29.5, 49.5), (49.9, 59.0),
    ]  # fmt: skip


def test_a_rest_without_speech_has_no_text():
    model = FakeModel(lambda heard: (spelled(0.0, " One.", 20.0, 20.0), -0.5), -0.1)
    _, transcript = run(model, 2, language="en", has_timestamps=True)
    assert transcript.text == "One. One."
    assert len(model.answers) == 2
    assert transcript.windows[-1].end == 59.0


def test_words_have_the_times_of_their_tokens():
    """The aligner gets the text without timestamps, and times are those of the file."""
    asked = []

    async def align(clip, prompt, text):
        asked.append((prompt, bytes(text)))
        return [(0.1 * index, 0.1 * (index + 1)) for index in range(len(text))]

    model = FakeModel(lambda heard: (spelled(0.0, " Oh, no!", 2.0), -0.5))
    _, transcript = run(model, 2, aligner=align, language="en", has_timestamps=True)
    assert asked == [([257, 258, 262, 265], b" Oh, no!")] * 2
    words = [
        (one.word, round(one.start, 3), round(one.end, 3))
        for window in transcript.windows
        for one in window.words
    ]
    assert words == [
        ("Oh,", 0.0, 0.4), ("no!", 0.4, 0.8), ("Oh,", 29.5, 29.9), ("no!", 29.9, 30.3),
    ]  # fmt: skip


def test_words_end_before_the_rest_of_a_window():
    async def align(clip, prompt, text):
        return [(20.0, clip.seconds)] * len(text)

    def reply(heard: Heard) -> tuple[list[int], float]:
        is_rest = heard.clip.seconds < 29
        return spelled(0.0, " b", 1.0) if is_rest else spelled(0.0, " a", 25.0, 25.0), -0.5

    _, transcript = run(FakeModel(reply), 1, aligner=align, language="en", has_timestamps=True)
    words = [word for window in transcript.windows for word in window.words]
    assert [(one.word, one.start, one.end) for one in words] == [
        ("a", 20.0, 25.0), ("b", 29.5, 29.5),
    ]  # fmt: skip


def test_logprobs_are_those_of_the_tokens():
    _, transcript = run(FakeModel(named), 1, language="en", has_logprobs=True)
    [window] = transcript.windows
    assert window.logprobs == [-0.25] * len(window.tokens)


def test_unlikely_answers_are_repeated_at_higher_temperatures():
    def reply(heard: Heard) -> tuple[list[int], float]:
        is_good = heard.params.temperature > 0.3
        return spelled(" good" if is_good else " bad"), -0.5 if is_good else -1.5

    model = FakeModel(reply)
    texts, transcript = run(model, 1, language="en", falls_back=True)
    assert "".join(texts) == transcript.text == "good"
    assert [one.params.temperature for one in model.answers] == [0.0, 0.2, 0.4]
    assert transcript.windows[0].temperature == 0.4


def test_repetitive_answers_are_repeated_up_to_temperature_1():
    model = FakeModel(lambda heard: (spelled(" and so on" * 20), -0.1))
    _, transcript = run(model, 1, language="en", falls_back=True, temperature=0.5)
    assert [one.params.temperature for one in model.answers] == [0.5, 0.7, 0.9]
    assert transcript.text.startswith("and so on and")


def test_silence_has_no_invented_text():
    model = FakeModel(lambda heard: (spelled(0.0, " Thanks.", 2.0), -1.5), no_speech_logprob=-0.1)
    _, transcript = run(model, 2, language="en", falls_back=True, has_timestamps=True)
    assert transcript.text == ""
    assert transcript.segments == []
    assert len(model.answers) == 2


def test_a_likely_answer_is_kept_whatever_no_speech_says():
    model = FakeModel(lambda heard: (spelled(" Yes."), -0.5), no_speech_logprob=-0.1)
    assert run(model, 1, language="en", falls_back=True)[1].text == "Yes."


def test_text_at_a_high_temperature_is_not_followed():
    def reply(heard: Heard) -> tuple[list[int], float]:
        is_first = number_of(heard.clip) == 0
        is_bad = is_first and heard.params.temperature < 0.6
        return spelled(" text"), -1.5 if is_bad else -0.5

    model = FakeModel(reply)
    run(model, 2, language="en", prompt=[7], falls_back=True, follows_previous=True)
    assert model.answers[-1].prompt == [257, 258, 262, 265]


def test_closing_ends_all_windows_that_run():
    model = FakeModel(named)

    async def leave() -> None:
        made = transcriber(model, language="en")
        async with aclosing(made.parts(windows(5), Transcript(150.0))) as parts:
            async for _ in parts:
                break

    asyncio.run(leave())
    assert len(model.answers) == 5
    assert all(one.is_closed for one in model.answers)


def test_an_error_of_a_window_ends_the_transcript():
    def reply(heard: Heard) -> tuple[list[int], float]:
        if number_of(heard.clip) == 1:
            raise InvalidRequestError("no")
        return named(heard)

    model = FakeModel(reply)
    with pytest.raises(InvalidRequestError, match="no"):
        run(model, 3, language="en")
    assert all(one.is_closed for one in model.answers)
