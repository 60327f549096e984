"""Times of tokens come from the attention that Transformers computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests import hearing
from tests.hearing import END, ENGLISH, NO_TIMESTAMPS, START, TRANSCRIBE
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.front.alignment import ClipAligner
from toolkit.speech.alignment import token_spans
from toolkit.speech.clip import Clip

pytestmark = pytest.mark.usefixtures("forked_processes")
PROMPT = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
CLIPS = [hearing.sound(11), hearing.sound(12, 9_000), hearing.sound(13, 500)]
TEXTS = [[72, 101, 108, 108, 111, 32, 121], [65, 32, 66], [33]]
MODES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 4, "enable_prefix_caching": False},
    {"tensor_parallel_size": 2},
]


def expected_spans(clip: hearing.Samples, text: Sequence[int]) -> list[tuple[float, float]]:
    """Return the times of a text by the weights of Transformers' heads."""
    ids = [*PROMPT, *text, END]

    def weights(module: torch.nn.Module) -> torch.Tensor:
        whisper: Any = module
        features = hearing.spectrogram(whisper, clip)
        with torch.no_grad():
            found = whisper(features, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
        heads = hearing.GENERATION["alignment_heads"]
        return torch.stack([found.cross_attentions[layer][0, head] for layer, head in heads])

    query = f"weights {hearing.digest(clip)} {ids}"
    found = hearing.reference().tensor(query, weights).numpy()
    frames = -(-len(clip) // 320)
    return token_spans(found[:, :, :frames], len(PROMPT) - 1, len(text))


@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_spans_equal_those_of_transformers(tmp_path, mode):
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 4} | mode
    async with AsyncLLM(str(hearing.save(tmp_path)), **settings) as llm:
        align = ClipAligner(llm, "times")
        for clip, text in zip(CLIPS, TEXTS, strict=True):
            found = await align(Clip.of(clip), PROMPT, text)
            np.testing.assert_allclose(found, expected_spans(clip, text), atol=1e-6)


async def test_text_that_does_not_fit_ends_with_the_clip(tmp_path):
    async with AsyncLLM(str(hearing.save(tmp_path)), device="cpu", dtype="float32") as llm:
        align = ClipAligner(llm, "times")
        found = await align(Clip.of(CLIPS[0]), PROMPT, [65] * hearing.CONTEXT)
    assert len(found) == hearing.CONTEXT
    assert found[-5:] == [(1.0, 1.0)] * 5
