"""The special tokens of a model that hears, and the rules of its answers."""

from pathlib import Path

import torch
from msgspec import structs

from toolkit.kernels.reference import SpeechRules
from toolkit.models.audio import SAMPLE_RATE
from toolkit.models.audio_encoder import AudioEncoderModule
from toolkit.speech.model_tokens import find_speech_tokens
from toolkit.speech.tokens import HearingInfo

NO_START = -1


def describe_hearing(folder: Path, encoder: AudioEncoderModule) -> HearingInfo:
    """Return what a model hears. Raises CheckpointError if its special tokens are unknown."""
    seconds = encoder.encoder.num_samples / SAMPLE_RATE
    return structs.replace(find_speech_tokens(folder), seconds=seconds)


def speech_rules(hearing: HearingInfo, vocab_size: int, device: torch.device) -> SpeechRules:
    """Return the rules of a model's answers."""
    tokens = hearing.tokens
    return SpeechRules.make(
        tokens.suppressed,
        tokens.first_suppressed,
        vocab_size,
        device,
        # Prompts of models that know English alone end with the start if there are timestamps.
        start=tokens.start if tokens.is_multilingual else NO_START,
        end=tokens.end,
        no_timestamps=tokens.no_timestamps,
        first_timestamp=tokens.first_timestamp,
        last_initial_timestamp=tokens.first_timestamp + tokens.most_initial_timestamp,
    )
