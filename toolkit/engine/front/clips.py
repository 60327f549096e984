"""Clips of prompts, for models that hear."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.engine.front.features import FeatureSource
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sequence import Feature
from toolkit.speech import asr_chat
from toolkit.speech.clip import SAMPLE_RATE, Clip
from toolkit.speech.resample import resample
from toolkit.text.tokenizer import Tokenizer
from toolkit.worker.info import SoundInfo, WorkerInfo

PARAM = "multi_modal_data"
MOST_THREADS = 16
LEAST_WINDOW = 2.0  # seconds that are transcribed at once
FRAME_SAMPLES = 320  # of a row that the encoder computes


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples at 16 kHz, or (samples, rate), and the parameter that has them."""

    samples: Any
    param: str


def read_clips(info: WorkerInfo, prompt: object) -> list[Clip]:
    """Return the clips of a prompt: one if the model transcribes.

    Raises InvalidRequestError for clips that the model does not take, and if it lacks one."""
    data = prompt.get(PARAM) if isinstance(prompt, Mapping) else None
    sounds = data.get("audio") if isinstance(data, Mapping) else None
    if sounds is None:
        sounds = []
    elif not isinstance(sounds, list):
        sounds = [sounds]
    limits = info.hearing or info.sound
    if limits is None:
        if not sounds:
            return []
        raise InvalidRequestError(
            "This model does not hear: the prompt has audio.",
            param=PARAM,
            code="model_not_supported",
        )
    if info.hearing is not None and len(sounds) != 1:
        if not sounds:
            raise no_sound_error("prompt")
        raise InvalidParamError(PARAM, f"has {len(sounds)} sounds, and the model hears one.")
    clips = [_clip_of(sound) for sound in sounds]
    how = ", or use /v1/audio/transcriptions, which does" if info.hearing else ""
    for clip in clips:
        require_length(clip, limits.seconds, PARAM, how)
    return clips


def require_length(clip: Clip, most_seconds: float, param: str, how: str = "") -> None:
    """Raise InvalidParamError for a clip that is empty or too long. how: to split it."""
    if clip.seconds > most_seconds:
        raise InvalidParamError(
            param,
            f"has {clip.seconds:.1f} s of audio, and the model hears {most_seconds:g} s at once. "
            f"Split it{how}.",
        )
    if not clip.num_samples:
        raise InvalidParamError(param, "has audio without samples.")


def place_clips(
    sound: SoundInfo, token_ids: list[int], clips: Sequence[Clip]
) -> tuple[list[int], tuple[Feature, ...]]:
    """Return a prompt with a placeholder for each row of a clip, and the features.

    It has one placeholder for each clip, or all of them already. Raises InvalidRequestError."""
    counts = [sound.num_rows(clip.num_samples) for clip in clips]
    places = [at for at, token in enumerate(token_ids) if token == sound.token_id]
    if len(places) == sum(counts):
        return token_ids, _features(clips, _runs(places, counts))
    if len(places) != len(clips):
        raise InvalidRequestError(
            f"The prompt has {len(places)} places for sound, and there are {len(clips)} clips.",
            param="prompt",
        )
    expanded: list[int] = []
    runs, last = [], 0
    for place, count in zip(places, counts, strict=True):
        expanded += token_ids[last:place]
        runs.append((len(expanded), count))
        expanded += [sound.token_id] * count
        last = place + 1
    return [*expanded, *token_ids[last:]], _features(clips, runs)


def _runs(places: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of each clip. Raises InvalidRequestError."""
    runs, done = [], 0
    for count in counts:
        own = places[done : done + count]
        if own[-1] - own[0] != count - 1:
            raise InvalidRequestError(
                f"A clip takes {count} tokens, and the prompt has others between them.",
                param="prompt",
            )
        runs.append((own[0], count))
        done += count
    return runs


def _features(clips: Sequence[Clip], runs: Sequence[tuple[int, int]]) -> tuple[Feature, ...]:
    return tuple(
        Feature(clip.digest, (run,), (run[1], 1)) for clip, run in zip(clips, runs, strict=True)
    )


def transcript_marker(info: WorkerInfo, tokenizer: Tokenizer | None) -> int | None:
    """Return the token before the text of answers, of a model such as Qwen3-ASR. None: no such."""
    if info.sound is None or tokenizer is None or not tokenizer.has_chat_template:
        return None
    found = tokenizer.encode(asr_chat.MARKER, add_special_tokens=False)
    return found[0] if len(found) == 1 else None


def window_seconds(info: WorkerInfo, num_prompt_tokens: int) -> float:
    """Return the length of windows of a model such as Qwen3-ASR. Half of the context is for text.

    num_prompt_tokens: without sound. Raises InvalidParamError if no room is left."""
    assert info.sound is not None, "tokens stand for clips"
    num_rows = info.sound.num_rows(int(asr_chat.SECONDS * SAMPLE_RATE))
    room = (info.max_model_len - num_prompt_tokens) / 2
    seconds = asr_chat.SECONDS * min(1.0, room / num_rows)
    if seconds < LEAST_WINDOW:
        raise InvalidParamError(
            "prompt",
            f"leaves no room for sound: the conversation has {num_prompt_tokens} of the context's "
            f"{info.max_model_len} tokens. Shorten it.",
        )
    return seconds


def no_sound_error(param: str) -> InvalidRequestError:
    """Return the error for a prompt of text alone, which a model that hears does not take."""
    return InvalidRequestError(
        "This model transcribes sound, and the prompt has none. Transcribe a file with tk "
        "transcribe or /v1/audio/transcriptions, or give LLM a prompt "
        '{"prompt_token_ids": ..., "multi_modal_data": {"audio": (samples, rate)}}.',
        param=param,
        code="model_not_supported",
    )


def with_clips(prompts: Sequence[object]) -> list[Any]:
    """Return prompts whose sound is clips with known digests, computed in threads.

    Raises InvalidRequestError."""

    def prepared(prompt: object) -> object:
        data = prompt.get(PARAM) if isinstance(prompt, Mapping) else None
        sound = data.get("audio") if isinstance(data, Mapping) else None
        if sound is None:
            return prompt
        assert isinstance(prompt, Mapping)
        assert isinstance(data, Mapping)
        clips = [_clip_of(one) for one in (sound if isinstance(sound, list) else [sound])]
        for clip in clips:
            _ = clip.digest  # which it keeps
        return {**prompt, PARAM: {**data, "audio": clips}}

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(prepared, prompts))


def _clip_of(sound: Any) -> Clip:
    """Return a clip of samples at 16 kHz, or of (samples, rate). Raises InvalidRequestError."""
    if isinstance(sound, Clip):
        return sound
    samples, rate = sound if isinstance(sound, tuple) and len(sound) == 2 else (sound, SAMPLE_RATE)
    if not isinstance(samples, np.ndarray) or isinstance(rate, bool):
        raise InvalidParamError(
            PARAM, "has audio that is no NumPy array of samples, nor a pair (array, rate in Hz)."
        )
    if not isinstance(rate, int | float) or not 0 < rate < 2**31 or int(rate) != rate:
        raise InvalidParamError(PARAM, f"has audio with the rate {rate!r}, not a number of Hz.")
    clip = Clip.of(samples)
    return clip if rate == SAMPLE_RATE else Clip.of(resample(clip.samples, int(rate)))


def feature_of(clip: Clip) -> Feature:
    """Return the feature of a clip, which all tokens of a prompt read. Its grid: (frames, 1)."""
    return Feature(clip.digest, grid=(-(-clip.num_samples // FRAME_SAMPLES), 1))


def source_of(clip: Clip) -> FeatureSource:
    """Return the source of a clip's bytes."""

    def load() -> Future[bytes]:
        done: Future[bytes] = Future()
        done.set_result(clip.data)
        return done

    return load
