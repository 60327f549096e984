"""A tiny Whisper with random weights that hears one second, as a folder to serve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests import checkpoints
from tests.references import Reference

RATE = 16_000
WINDOW = RATE  # samples of a clip
CONTEXT = 64  # tokens
END = 256
START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(257, 265)
FIRST_TIMESTAMP = 265
VOCAB = FIRST_TIMESTAMP + 51
SPECIAL = (
    *("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
SETTINGS = {
    "vocab_size": VOCAB, "d_model": 32, "num_mel_bins": 80, "max_source_positions": 50,
    "max_target_positions": CONTEXT, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56, "decoder_start_token_id": START, "pad_token_id": END,
    "begin_suppress_tokens": None, "suppress_tokens": None, "scale_embedding": True,
}  # fmt: skip
GENERATION = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "prev_sot_token_id": PREVIOUS,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
    "max_initial_timestamp_index": 25,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "alignment_heads": [[1, 0], [2, 3]],
    "return_timestamps": False,
}
SUPPRESSED = {"suppress_tokens": [221, 263, 257, 262], "begin_suppress_tokens": [80, 256]}
"""Fields of generation_config.json: these tokens occur in answers without rules."""
Samples = npt.NDArray[np.float32]


def reference(**settings: Any) -> Reference:
    """Return Transformers' model. `settings`: fields of its config with other values."""
    return checkpoints.make_model("Whisper", SETTINGS | settings)


def save(folder: Path, model: Reference | None = None, **generation: Any) -> Path:
    """Write a model. `generation`: fields of generation_config.json with other values."""
    checkpoints.save(model or reference(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    [first, *_] = tokenizer["added_tokens"]
    times = [f"<|{index * 0.02:.2f}|>" for index in range(VOCAB - FIRST_TIMESTAMP)]
    tokenizer["added_tokens"] = [first] + [
        first | {"id": START + index, "content": text} for index, text in enumerate(SPECIAL)
    ]
    tokenizer["added_tokens"] += [
        first | {"id": FIRST_TIMESTAMP + index, "content": text, "special": False}
        for index, text in enumerate(times)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | generation))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def sound(seed: int, num_samples: int = WINDOW) -> Samples:
    """Return noise and a tone, of a level and a frequency that follow from the seed."""
    random = np.random.RandomState(seed)
    time = np.arange(num_samples) / RATE
    level, frequency = random.uniform(0.05, 0.5), random.uniform(80, 3000)
    tone = np.sin(2 * np.pi * frequency * time) * np.sin(np.pi * time * random.uniform(1, 6))
    noise = random.standard_normal(num_samples) * random.uniform(0.01, 0.3)
    return (level * (tone + noise)).clip(-1, 1).astype(np.float32)


def answer(model: Reference, clip: Samples, prompt: Sequence[int], count: int) -> list[int]:
    """Return `count` greedy tokens of Transformers; the end does not end them.

    Unless the prompt ends with the start, with the rules of GENERATION and `SUPPRESSED`."""
    has_rules = prompt[-1] != START

    def compute(module: torch.nn.Module) -> list[int]:
        whisper: Any = module
        encoded = whisper.model.encoder(spectrogram(whisper, clip))
        tokens = list(prompt)
        rules = _rules(prompt) if has_rules else []
        for _ in range(count):
            given = torch.tensor([tokens])
            with torch.no_grad():
                logits = whisper(encoder_outputs=encoded, decoder_input_ids=given).logits[0, -1]
            for rule in rules:
                logits = rule(given, logits[None])[0]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-4, "a near-tie: use another clip"
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    return model.tokens(f"clip {digest(clip)} {list(prompt)}", compute, count)


def _rules(prompt: Sequence[int]) -> list[Any]:
    """Return Transformers' processors of logits for the answer to a prompt."""
    from transformers import GenerationConfig
    from transformers.generation import logits_process

    first, begin = len(prompt), list(SUPPRESSED["begin_suppress_tokens"])
    rules: list[Any] = [
        logits_process.SuppressTokensLogitsProcessor(list(SUPPRESSED["suppress_tokens"])),
        logits_process.SuppressTokensAtBeginLogitsProcessor(begin, first),
    ]
    if prompt[-1] != NO_TIMESTAMPS:
        settings = GenerationConfig(**GENERATION)
        rules.append(logits_process.WhisperTimeStampLogitsProcessor(settings, first))
    return rules


def spectrogram(whisper: Any, clip: Samples) -> torch.Tensor:
    """Return Transformers' features of a clip, padded to a window."""
    from transformers import WhisperFeatureExtractor

    seconds = whisper.config.max_source_positions // 50
    extract = WhisperFeatureExtractor(whisper.config.num_mel_bins, chunk_length=seconds)
    return extract(clip, sampling_rate=RATE, return_tensors="pt").input_features


def digest(clip: Samples) -> str:
    return hashlib.sha256(clip.tobytes()).hexdigest()[:12]
