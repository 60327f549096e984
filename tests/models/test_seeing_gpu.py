"""Prompts with pictures on a GPU: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import pictured
from tests.models.test_seeing import GREEDY
from tests.pictured import ASKED, MODELS, answer, prompts
from toolkit import LLM
from toolkit.engine.front import pictures

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"kv_cache_memory": 0.05, "max_num_seqs": 16, "dtype": "float32"}
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "kernel by kernel": {"enforce_eager": True, "async_scheduling": False},
    "single tokens": {"max_num_batched_tokens": 4, "max_num_seqs": 4, "mm_cache_gib": 0.0},
    "chunks": {"max_num_batched_tokens": 17, "mm_cache_gib": 0.0},
    "swap": {
        "num_gpu_blocks_override": 18, "max_model_len": 96, "block_size": 8, "swap_space": 0.01,
    },
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setattr(pictures, "PicturePool", pictured.InlinePool)
    return lambda name: pictured.save(name, tmp_path / name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_transformers(folder, name, mode):
    settings = SIZES | MODES[mode]
    if name == "gemma3" and mode == "single tokens":
        settings["max_num_batched_tokens"] = 9  # a step has all of a picture
    llm = LLM(str(folder(name)), **settings)
    expected = [answer(name, one) for one in ASKED]
    for _ in range(2):  # cold, and warm
        found = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in found] == expected
    llm.shutdown()


@pytest.mark.parametrize("name", MODELS)
def test_captured_towers_compute_the_same(folder, name):
    """Pictures of different sizes, up to a graph's end and past it, and too many for a graph."""
    llm = LLM(str(folder(name)), **SIZES | {"dtype": "bfloat16"})
    encoder = llm._core.executor._worker.runner.features.table.encoder
    assert encoder._graphs
    random = np.random.RandomState(0)
    tower = encoder.tower.tower
    grids = [[(8, 9)], [(16, 8)], [(16, 9), (3, 30)], [(40, 51)], [(5, 5)] * 20, [(1, 1)]]
    if tower.is_tiled:
        side = tower.side // tower.merge
        grids = [[(rows * side, columns * side) for rows, columns in one] for one in grids]
    for some in grids:
        counts = [tower.num_patches(grid) * tower.patches.pixels for grid in some]
        data = [random.randint(0, 256, n, dtype=np.uint8).tobytes() for n in counts]
        found = encoder.encode(data, some).clone().double()
        graphs, encoder._graphs = encoder._graphs, {}
        expected = encoder.encode(data, some).double()
        encoder._graphs = graphs
        # Products of other numbers of rows are rounded differently.
        assert (found - expected).norm() < 4 * 2**-8 * expected.norm()
    llm.shutdown()
