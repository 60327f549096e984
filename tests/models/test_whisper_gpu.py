"""Clips on a GPU: `make test-gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import engines, hearing
from tests.engine.test_alignment import CLIPS, PROMPT, TEXTS, expected_spans
from tests.models.test_whisper import COUNT, PAIRS, RULED, ask
from toolkit import LLM
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.front.alignment import ClipAligner
from toolkit.speech.clip import Clip

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"kv_cache_memory": 0.05, "max_num_seqs": 8, "dtype": "float32"}
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "kernel by kernel": {"enforce_eager": True, "async_scheduling": False},
    "few tokens": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "swap": {"num_gpu_blocks_override": 22, "max_model_len": 48, "swap_space": 0.01},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("mode", MODES)
def test_answers_equal_transformers(tmp_path, mode):
    folder = hearing.save(tmp_path, **hearing.SUPPRESSED)
    model, pairs = hearing.reference(), PAIRS + RULED
    expected = [hearing.answer(model, *pair, COUNT) for pair in pairs]
    llm = LLM(str(folder), **SIZES | MODES[mode])
    num_compiled = engines.count_stats(llm, "late_compilations")
    for order in (slice(None), slice(0, 1), slice(None, None, -1)):
        assert ask(llm, pairs[order]) == expected[order]
    assert num_compiled() == 0
    llm.shutdown()


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_graphs_fill_pages_as_kernels_do(tmp_path, cache):
    """One to four clips, with a graph for as many or for more."""
    settings = SIZES | {"dtype": "bfloat16", "kv_cache_dtype": cache}
    llm = LLM(str(hearing.save(tmp_path)), **settings)
    runner = engines.runner(llm)
    clips, cache = runner.features, runner.caches[0]
    [pages] = cache._tensors
    graphs = clips._graphs
    assert graphs
    count = -(-clips.encoder.num_rows // clips._page_tokens)
    for n in range(1, 5):
        sounds = [hearing.sound(n * 10 + i) for i in range(n)]
        held = [list(range(1 + i * count, 1 + (i + 1) * count)) for i in range(n)]
        found = []
        for clips._graphs in (graphs, {}):
            pages.zero_()
            clips._encode(sounds, held)
            found.append(pages.view(cache.dtype).float().cpu().numpy())
        assert found[0].any()
        # Products of other numbers of rows are rounded differently.
        np.testing.assert_allclose(found[0], found[1], atol=0.05 * np.abs(found[1]).max())
        assert (found[0] != 0).sum() == (found[1] != 0).sum()
    clips._graphs = graphs
    llm.shutdown()


async def test_spans_equal_those_of_transformers(tmp_path):
    async with AsyncLLM(str(hearing.save(tmp_path)), **SIZES) as llm:
        align = ClipAligner(llm, "times")
        for clip, text in zip(CLIPS, TEXTS, strict=True):
            found = await align(Clip.of(clip), PROMPT, text)
            np.testing.assert_allclose(found, expected_spans(clip, text), atol=1e-6)
