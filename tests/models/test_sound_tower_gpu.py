"""Clips whose rows stand for tokens, on a GPU: `make test-gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import asr, engines
from tests.models.test_sound_tower import CLIPS, PROMPTS, ask
from toolkit import LLM
from toolkit.speech.clip import Clip

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"kv_cache_memory": 0.05, "max_num_seqs": 8, "mm_cache_gib": 0.01}
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "kernel by kernel": {"enforce_eager": True, "async_scheduling": False},
    "few tokens": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("mode", MODES)
def test_answers_equal_transformers(tmp_path, mode):
    model = asr.reference()
    expected = [asr.answer(model, *one) for one in PROMPTS]
    llm = LLM(str(asr.save(tmp_path)), dtype="float32", **SIZES | MODES[mode])
    num_compiled = engines.count_stats(llm, "late_compilations")
    for order in (slice(None), slice(0, 1), slice(None, None, -1)):
        assert ask(llm, PROMPTS[order]) == expected[order]
    assert num_compiled() == 0
    llm.shutdown()


def test_rows_in_bfloat16_are_near_those_in_fp32(tmp_path):
    """The first has packed attention."""
    folder, found = str(asr.save(tmp_path)), []
    for dtype in ("bfloat16", "float32"):
        llm = LLM(folder, dtype=dtype, **SIZES)
        encoder = engines.runner(llm).features.table.encoder
        rows = encoder.encode([Clip.of(clip).data for clip in CLIPS], [(0, 0)] * len(CLIPS))
        found.append(rows.float().cpu().numpy())
        llm.shutdown()
    np.testing.assert_allclose(found[0], found[1], atol=0.05 * np.abs(found[1]).max())
