"""Answers to prompts with pictures equal Transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import engines, pictured
from tests.pictured import ASKED, COUNT, MODELS, PICTURE, Asked, InlinePool, answer, prompts
from toolkit import LLM, SamplingParams
from toolkit.engine.front import pictures
from toolkit.errors import InvalidRequestError
from toolkit.sequence import Feature
from toolkit.worker.axes import axis_positions, shift_after

SETTINGS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
MODES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks through pictures": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "small steps that overlap": {
        "max_num_batched_tokens": 8, "max_num_seqs": 3, "async_scheduling": True,
        "enable_prefix_caching": False,
    },
    "room for one picture": {"mm_cache_gib": 0.0, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "preemption": {
        "num_gpu_blocks_override": 12, "max_model_len": 96, "block_size": 8, "swap_space": 0.0,
    },
    "swap": {
        "num_gpu_blocks_override": 12, "max_model_len": 96, "block_size": 8, "swap_space": 0.01,
        "max_num_batched_tokens": 20, "max_num_seqs": 5,
    },
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "max_num_seqs": 8,
    },
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    "two stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 4},
}  # fmt: skip
FEW = ("chunks through pictures", "room for one picture", "swap")
"""Modes of all models. Of the others, one each."""
CASES = [("qwen2.5-vl", mode) for mode in MODES]
CASES += [(name, mode) for name in ("qwen2-vl", "qwen3-vl") for mode in FEW]
CASES += [("qwen3-vl", "two ranks"), ("qwen3-vl", "drafts")]
CASES += [("qwen3-vl-moe", "chunks through pictures"), ("qwen3-vl-moe", "two ranks")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name in MODELS to its checkpoint."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = pictured.save(name, tmp_path_factory.mktemp("pictured") / name)
        return made[name]

    return get


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[InlinePool]]:
    """Prepare pictures in this process. Return the pools that are made."""
    made: list[InlinePool] = []

    def make(*args: Any) -> InlinePool:
        made.append(InlinePool(*args))
        return made[-1]

    monkeypatch.setattr(pictures, "PicturePool", make)
    return made


def answers(llm: LLM, asked: tuple[Asked, ...] = ASKED) -> list[list[int]]:
    found = llm.generate(prompts(asked), GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_answers_equal_transformers(folder, pools, name, mode):
    llm = LLM(str(folder(name)), **SETTINGS, **MODES[mode])
    expected = [answer(name, one) for one in ASKED]
    num_preempted = (
        engines.count_stats(llm, "num_preemptions") if "swap_space" in MODES[mode] else None
    )
    try:
        assert answers(llm) == expected  # cold
        assert answers(llm) == expected  # warm
        assert answers(llm, ASKED[::-1]) == expected[::-1]
        assert num_preempted is None or num_preempted() > 0
    finally:
        llm.shutdown()


def test_experts_may_have_the_layout_of_transformers(tmp_path, pools):
    folder = pictured.save("qwen3-vl-moe", tmp_path / "moe", is_published=False)
    llm = LLM(str(folder), **SETTINGS)
    assert answers(llm, ASKED[:2]) == [answer("qwen3-vl-moe", one) for one in ASKED[:2]]
    llm.shutdown()


def test_pictures_change_answers():
    """Else no test here would notice a lost picture."""
    for name in MODELS:
        assert answer(name, ASKED[0]) != answer(name, ASKED[3])


def test_cached_prompts_prepare_no_picture(folder, pools):
    llm = LLM(str(folder("qwen2.5-vl")), **SETTINGS, block_size=8)
    answers(llm, ASKED[:1])
    (pool,) = pools
    assert pool.num_processed == 1
    answers(llm, ASKED[:1])
    assert pool.num_processed == 1  # the prompt is cached
    answers(llm, ASKED[4:])
    assert pool.num_processed == 1  # its rows are
    llm.shutdown()


def test_text_before_a_picture_is_cached_for_other_pictures(folder, pools):
    llm = LLM(str(folder("qwen2.5-vl")), **SETTINGS, block_size=4)
    text = list(range(11, 20))
    cached = []
    for picture in (0, 1, 0):
        asked = Asked([*text, *pictured.SEEN, 30], (picture,))
        (found,) = llm.generate([asked.prompt], GREEDY, use_tqdm=False)
        cached.append(found.num_cached_tokens)
    assert cached == [0, 8, 32]  # blocks of text; and all but the last two tokens
    llm.shutdown()


def test_prompts_hold_all_placeholders(folder, pools):
    llm = LLM(str(folder("qwen2.5-vl")), **SETTINGS)
    (found,) = llm.generate(prompts(ASKED[:1]), GREEDY, use_tqdm=False)
    assert found.prompt_token_ids.count(PICTURE) == 24  # 6 x 4 squares of 8 pixels
    expanded = {"prompt_token_ids": found.prompt_token_ids} | prompts(ASKED[:1])[0]
    expanded["prompt_token_ids"] = found.prompt_token_ids
    (again,) = llm.generate([expanded], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == found.outputs[0].token_ids
    llm.shutdown()


def test_wrong_prompts_are_refused(folder, pools):
    llm = LLM(str(folder("qwen2.5-vl")), **SETTINGS, limit_mm_per_prompt="image=1")
    given = ASKED[0].prompt
    many = given | {"multi_modal_data": {"image": [pictured.image(0)] * 2}}
    for prompt, message in (
        (many, "has 2 pictures, and at most 1 are allowed"),
        (given | {"prompt_token_ids": [11, 12]}, "has 0 places for pictures, and there are 1"),
        (given | {"multi_modal_data": {"image": ["a.png"]}}, "has a str, where images of Pillow"),
        (given | {"multi_modal_data": {"video": []}}, 'must be {"image": an image or a list'),
        (
            given | {"multi_modal_data": {"image": pictured.Image.new("RGB", (2000, 2))}},
            "200 times",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.shutdown()


def test_a_text_model_refuses_pictures(folder, pools):
    llm = LLM(str(folder("qwen2.5-vl")), **SETTINGS, limit_mm_per_prompt='{"image": 0}')
    assert llm.info.sight is None
    with pytest.raises(InvalidRequestError, match="reads text alone"):
        llm.generate(prompts(ASKED[:1]), GREEDY, use_tqdm=False)
    assert answers(llm, ASKED[1:2]) == [answer("qwen2.5-vl", ASKED[1])]
    llm.shutdown()


def test_positions_follow_the_larger_side():
    """Text, two pictures with text between them, and text, as in Qwen2-VL's paper."""
    features = (
        Feature(b"a", ((2, 6),), (2, 3)),
        Feature(b"b", ((9, 2),), (2, 1)),
    )
    found = axis_positions(features)
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6],
    ]
    assert np.array_equal(found, expected)
    assert 11 + shift_after(features) == 8
