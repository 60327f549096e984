"""Clips of prompts, for models that hear."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from toolkit.engine.front.features import FeatureSource
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sequence import Feature
from toolkit.speech.clip import SAMPLE_RATE, Clip
from toolkit.speech.resample import resample
from toolkit.speech.tokens import HearingInfo

PARAM = "multi_modal_data"
MOST_THREADS = 16
FRAME_SAMPLES = 320  # of a row that the encoder computes


def require_clip(hearing: HearingInfo | None, prompt: object) -> Clip | None:
    """Return the clip of a prompt; None if the model does not hear.

    Raises InvalidRequestError if it has a clip and should not, or none and should."""
    data = prompt.get(PARAM) if isinstance(prompt, Mapping) else None
    sound = data.get("audio") if isinstance(data, Mapping) else None
    if hearing is None:
        if sound is None:
            return None
        raise InvalidRequestError(
            "This model does not hear: the prompt has audio.",
            param=PARAM,
            code="model_not_supported",
        )
    if isinstance(sound, list) and len(sound) == 1:
        (sound,) = sound
    if sound is None or (isinstance(sound, list) and not sound):
        raise no_sound_error("prompt")
    clip = _clip_of(sound)
    if clip.seconds > hearing.seconds:
        raise InvalidParamError(
            PARAM,
            f"has {clip.seconds:.1f} s of audio, and the model hears {hearing.seconds:g} s at "
            "once. Split it, or use /v1/audio/transcriptions, which does.",
        )
    if not clip.num_samples:
        raise InvalidParamError(PARAM, "has audio without samples.")
    return clip


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
        if sound is None or isinstance(sound, list):
            return prompt
        assert isinstance(prompt, Mapping)
        assert isinstance(data, Mapping)
        clip = _clip_of(sound)
        _ = clip.digest  # which it keeps
        return {**prompt, PARAM: {**data, "audio": clip}}

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
