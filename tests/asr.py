"""A tiny Qwen3-ASR with random weights, as a folder to serve, and Transformers' answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from tests import checkpoints, hearing
from tests.references import Reference

START, END, AUDIO_START, SOUND, AUDIO_END, MARKER = range(257, 263)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
TEXT = "<asr_text>"
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = (*_VISIBLE, *(byte for byte in range(256) if byte not in _VISIBLE))
"""Byte of each token, in GPT-2's order."""
COUNT = 16  # tokens of an answer
SETTINGS = {
    "audio_token_id": SOUND,
    "tie_word_embeddings": False,
    "audio_config": {
        "num_mel_bins": 20, "encoder_layers": 2, "encoder_attention_heads": 4, "d_model": 32,
        "encoder_ffn_dim": 56, "n_window": 50, "n_window_infer": 200, "output_dim": 48,
        "downsample_hidden_size": 12, "activation_function": "gelu",
    },
    "text_config": {
        "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 72, "head_dim": 16,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "vocab_size": 264,
    },
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reads parts as Qwen3-ASR's."""


def reference(**changes: Any) -> Reference:
    return checkpoints.make_model("Qwen3ASR", SETTINGS | changes)


def answer(model: Reference, prompt: list[int], clips: list[hearing.Samples]) -> list[int]:
    """Return greedy tokens of Transformers about clips, each of which is one token."""

    @torch.no_grad()
    def compute(module: torch.nn.Module) -> list[int]:
        asr: Any = module
        rows = [asr.get_audio_features(*spectrogram(asr, clip)).pooler_output for clip in clips]
        counts = iter([len(own.reshape(-1, own.shape[-1])) for own in rows])
        ids = [one for t in prompt for one in ([t] * next(counts) if t == SOUND else [t])]
        where = torch.tensor(ids) == SOUND
        for _ in range(COUNT):
            embeddings = asr.get_input_embeddings()(torch.tensor([ids]))
            found = torch.cat([own.reshape(-1, own.shape[-1]) for own in rows])
            embeddings[0, : len(where)][where] = found
            logits = asr(inputs_embeds=embeddings).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-4, "a near-tie: use another clip"
            ids.append(int(logits.argmax()))
        return ids[-COUNT:]

    names = [hearing.digest(clip) for clip in clips]
    return model.tokens(f"clips {names} {prompt}", compute, COUNT)


def tokens(text: str) -> list[int]:
    """Return the tokens of a text: bytes, and special tokens."""
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, (*SPECIAL, TEXT))) + ")", text):
        if part == TEXT:
            found.append(MARKER)
        elif part in SPECIAL:
            found.append(START + SPECIAL.index(part))
        else:
            found += [BYTES.index(byte) for byte in part.encode()]
    return found


def spelled(token_ids: list[int]) -> str:
    """Return the text of tokens, without special ones."""
    return bytes(BYTES[token] for token in token_ids if token < 256).decode(errors="replace")


def spectrogram(asr: Any, clip: hearing.Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Transformers' features of a clip, and which of its frames are sound."""
    from transformers.models.qwen3_asr import Qwen3ASRFeatureExtractor

    bands = asr.config.audio_config.num_mel_bins
    extract = Qwen3ASRFeatureExtractor(feature_size=bands)
    found = extract(clip, sampling_rate=hearing.RATE, padding="longest", return_attention_mask=True)
    return found.input_features, found.attention_mask


def save(folder: Path) -> Path:
    """Write the model, with a tokenizer that has its special tokens."""
    checkpoints.save(reference(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    [first, *_] = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [first] + [
        first | {"id": START + index, "content": text} for index, text in enumerate(SPECIAL)
    ]
    marker = {"id": MARKER, "content": TEXT, "special": False}
    tokenizer["added_tokens"].append(first | marker)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    checkpoints.edit_json(folder / "tokenizer_config.json", extra_special_tokens=list(SPECIAL))
    return folder
