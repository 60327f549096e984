"""Answers to prompts with pictures equal Transformers'."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import engines, pictured
from tests.models import test_towers
from tests.pictured import ASKED, COUNT, MODELS, PICTURE, Asked, InlinePool, answer, prompts
from toolkit import LLM, SamplingParams
from toolkit.engine.front import pictures
from toolkit.errors import CheckpointError, ConfigError, InvalidRequestError
from toolkit.models.build import load_config
from toolkit.models.tower import TowerModel
from toolkit.pictures.families import find_family
from toolkit.pictures.processor import PictureProcessor
from toolkit.pictures.settings import ProcessorSettings, read_processor
from toolkit.pictures.tokens import find_frame
from toolkit.sequence import Feature
from toolkit.weights.loading.loader import load_weights, tensor_names
from toolkit.worker.axes import axis_positions, shift_after
from toolkit.worker.picture_encoder import PictureEncoder

pytestmark = pytest.mark.usefixtures("forked_processes")
# The memory of pictures is small: each step of a test checks all of its pages.
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "dtype": "float32", "mm_cache_gib": 0.001,
}  # fmt: skip
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
CASES = [("qwen2.5-vl", mode) for mode in MODES if mode != "two ranks"]
CASES += [("gemma3", mode) for mode in MODES if mode not in ("small steps that overlap", "swap")]
# Of the other models, some modes each.
CASES += [("qwen2-vl", "room for one picture"), ("qwen2-vl", "chunks through pictures")]
CASES += [("qwen3-vl", "swap"), ("qwen3-vl", "drafts"), ("qwen3-vl", "chunks through pictures")]
CASES += [("qwen3-vl-moe", "two ranks"), ("qwen3.5-moe", "room for one picture")]
CASES += [("qwen3.5", "preemption"), ("qwen3.5", "chunks through pictures")]
CASES += [("mistral3", "room for one picture"), ("mistral3", "swap")]
CASES += [("llava", "drafts"), ("llava-full", "chunks through pictures")]
CASES += [("idefics3", "chunks through pictures"), ("idefics3", "two stages")]
CASES += [("idefics3-whole", "all at once"), ("smolvlm", "preemption")]
CASES += [("internvl", "swap"), ("internvl", "two ranks"), ("internvl-llama", "all at once")]
CASES += [("internvl-rms", "room for one picture")]
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


def load_encoder(path: Path) -> tuple[PictureEncoder, ProcessorSettings]:
    """Return a checkpoint's tower alone, and the settings of its image processor."""
    sight = load_config(path).sight
    sides = {"patch_size": sight.tower.patches.size, "merge": sight.tower.merge}
    settings = read_processor(path, sight.family, {}, **sides)
    tower = TowerModel(sight.tower, sight.tower.unused)
    load_weights(tower, path, "safetensors", elsewhere=tensor_names(path, "safetensors"))
    tower.normalize_by(settings.rescale_factor, settings.mean, settings.std)
    return PictureEncoder(tower, torch.device("cpu")), settings


def answers(llm: LLM, asked: tuple[Asked, ...] = ASKED) -> list[list[int]]:
    found = llm.generate(prompts(asked), GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_answers_equal_transformers(folder, pools, name, mode):
    llm = LLM(str(folder(name)), **SETTINGS | engines.scarce(folder(name), MODES[mode]))
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


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_towers_equal_transformers(tmp_path, name):
    encoder, settings = load_encoder(pictured.save(name, tmp_path / name, is_loud=False))
    processor = PictureProcessor(settings)
    for which in ((0,), (1, 2), (2, 0, 1)):
        images = [pictured.image(one) for one in which]
        data = [processor.process(one)[1].tobytes() for one in images]
        grids = [find_family(settings.family).token_grid(settings, *one.size) for one in images]
        found = encoder.encode(data, grids)
        expected = pictured.rows(name, which)
        away = (found[:, : expected.shape[1]] - expected).abs().max() / expected.abs().max()
        assert away < 1e-5


@pytest.mark.parametrize("name", ["llava", "internvl-rms"])
def test_random_towers_have_finite_rows(folder, name):
    tower = load_config(folder(name)).sight.tower
    torch.use_deterministic_algorithms(True)  # memory that is not initialized is NaN
    try:
        model = TowerModel(tower)
        load_weights(model, folder(name), "dummy")
    finally:
        torch.use_deterministic_algorithms(False)
    grid = (tower.side // tower.merge, tower.side // tower.merge)
    pixels = bytes(tower.num_patches(grid) * tower.patches.pixels)
    assert PictureEncoder(model, torch.device("cpu")).encode([pixels], [grid]).isfinite().all()


def test_pictures_see_both_ways():
    """Else no test here would notice Gemma 3's mask."""
    assert answer("gemma3", ASKED[0]) != pictured.causal_answer("gemma3", ASKED[0])


def test_cached_prefixes_end_within_pictures(folder, pools):
    llm = LLM(str(folder("gemma3")), **SETTINGS, block_size=4)
    asked = Asked([11, pictured.START, PICTURE], (0,))  # the picture's tokens: 2 to 10
    for cached in (0, 8):
        (found,) = llm.generate([asked.prompt], GREEDY, use_tqdm=False)
        assert found.num_cached_tokens == cached
        assert found.outputs[0].token_ids == answer("gemma3", asked)
    llm.shutdown()


def test_pictures_fit_into_a_step(folder, pools):
    settings = SETTINGS | {"max_num_batched_tokens": 8, "max_num_seqs": 2}
    with pytest.raises(ConfigError, match=r"all 9 tokens of a picture\. Use at least 9, or"):
        LLM(str(folder("gemma3")), **settings)
    llm = LLM(str(folder("gemma3")), **settings, limit_mm_per_prompt='{"image": 0}')
    assert answers(llm, ASKED[1:2]) == [answer("gemma3", ASKED[1])]
    llm.shutdown()


def test_published_names_of_gemma3(folder, tmp_path, pools):
    shutil.copytree(folder("gemma3"), tmp_path / "gemma3")
    file = tmp_path / "gemma3" / "model.safetensors"
    tensors = {
        re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    llm = LLM(str(tmp_path / "gemma3"), **SETTINGS)
    assert answers(llm, ASKED[:2]) == [answer("gemma3", one) for one in ASKED[:2]]
    llm.shutdown()


def test_frames_of_pictures_are_expanded(folder, pools):
    """The tests' tokenizer has bytes as tokens: * begins a picture, and + ends it."""
    llm = LLM(str(folder("gemma3")), **SETTINGS)
    tokenizer = llm.tokenizer
    whole = "\n\n*" + 9 * "(" + "+\n\n"
    ids = tokenizer.encode("a*b")
    framed = [ids[0], pictured.START, *[PICTURE] * 9, pictured.END, ids[2]]
    for text, tokens in (
        ("a*b", tokenizer.encode(f"a{whole}b")),
        (f"a{whole}b", tokenizer.encode(f"a{whole}b")),
        (ids, framed),
        (framed, framed),
    ):
        name = "prompt" if isinstance(text, str) else "prompt_token_ids"
        prompt = {name: text, "multi_modal_data": {"image": pictured.image(0)}}
        (found,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert found.prompt_token_ids == tokens
    (found,) = llm.generate(["a*b"], GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == ids  # there is no picture
    for wrong in ("a", "a**b", "a*((b"):
        prompt = {"prompt": wrong, "multi_modal_data": {"image": pictured.image(0)}}
        with pytest.raises(InvalidRequestError, match="places for pictures"):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.shutdown()


def test_joints_of_frames_are_tokens_if_there_are_some(folder, tmp_path):
    assert find_frame(folder("gemma3"), (9, 10), 4).after == (10,)
    added = [{"id": 108, "content": "\n\n"}, {"id": 109, "content": "\n\n\n"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    frame = find_frame(tmp_path, (9, 10), 4)
    assert (frame.before, frame.after) == ((108, 9), (10, 108))


def test_frames_of_pictures_in_conversations(folder, pools):
    llm = LLM(str(folder("gemma3")), **SETTINGS)
    parts = [{"type": "image_pil", "image_pil": pictured.image(0)}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    of_parts = (
        "{% for m in messages %}<|user|>{% for part in m.content %}{{ '*' if part.type == 'image' "
        "else part.text }}{% endfor %}{% endfor %}<|assistant|>"
    )
    whole = llm.tokenizer.encode("\n\n*" + 9 * "(" + "+\n\nb")
    for options, after in (({}, [259, 258]), ({"chat_template": of_parts}, [258])):
        tokens = [257, *whole, *after]
        assert llm.chat_prompt(messages, **options) == tokens
        (found,) = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        assert found.prompt_token_ids == tokens
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


def test_rows_of_tokens_have_ends(folder, pools):
    """Mistral 3 has a token after each row of a picture, and another after the last."""
    llm = LLM(str(folder("mistral3")), **SETTINGS)
    (found,) = llm.generate(prompts(ASKED[:1]), GREEDY, use_tqdm=False)
    row = [PICTURE] * 6
    end = [*ASKED[0].token_ids[-3:]]
    picture = [*row, pictured.BREAK] * 3 + [*row, pictured.LAST]
    assert found.prompt_token_ids == [*ASKED[0].token_ids[:3], *picture, *end]
    expanded = ASKED[0].prompt | {"prompt_token_ids": found.prompt_token_ids}
    (again,) = llm.generate([expanded], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == found.outputs[0].token_ids
    expanded["prompt_token_ids"] = [20 if id == pictured.BREAK else id for id in picture]
    with pytest.raises(InvalidRequestError, match="28 tokens in 4 rows, and the prompt has others"):
        llm.generate([expanded], GREEDY, use_tqdm=False)
    llm.shutdown()


def inner_tower(name: str) -> str:
    """Return the name of a tensor of LLaVA as older checkpoints have it."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("llava", inner_tower),
        ("llava", test_towers.inner),
        ("mistral3", test_towers.inner),
        ("internvl", test_towers.inner),
    ],
)
def test_names_of_towers_may_be_others(folder, pools, tmp_path, name, rename):
    path = test_towers.renamed(folder(name), tmp_path / "m", rename)
    llm = LLM(str(path), **SETTINGS)
    assert answers(llm, ASKED[:1]) == [answer(name, ASKED[0])]
    llm.shutdown()


@pytest.mark.parametrize(
    ("name", "part", "changes", "words"),
    [
        ("mistral3", "vision_config", {"scale": 2}, "vision_config: it has scale: 2"),
        ("mistral3", "vision_config", {"head_dim": 8}, "head_dim is 8, and tk supports"),
        ("mistral3", "vision_config", {"hidden_act": "x"}, "Unsupported activation function 'x'"),
        ("mistral3", "vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ("mistral3", "", {"vision_feature_layer": [1, 2]}, "supports one for mistral3"),
        ("mistral3", "", {"vision_feature_layer": -5}, "vision_config has 3 layers"),
        ("llava", "", {"vision_feature_select_strategy": "x"}, "vision_feature_select_strategy"),
        ("llava", "", {"projector_hidden_act": "x"}, "Unsupported activation function 'x'"),
        ("llava", "vision_config", {"image_size": 3}, "have no patch of 4"),
        ("llava", "preprocessor", {"crop_size": 24}, "6 x 6 patches, and the tower takes 5 x 5"),
        ("llava", "preprocessor", {"do_center_crop": False}, "pictures must have one size"),
        ("llava", "preprocessor", {"do_pad": True, "pad_size": {"height": 21, "width": 21}}, "pad"),
        ("mistral3", "preprocessor", {"do_resize": False}, "pictures must be resized"),
        ("mistral3", "preprocessor", {"size": {"shortest_edge": 9}}, "longest_edge, or a height"),
        ("mistral3", "processor", {"image_end_token": "[X]"}, r"has no token '\[X\]'"),
        ("idefics3", "", {"scale_factor": 4}, "scale_factor is 4, which does not divide the 6 pat"),
        ("idefics3", "vision_config", {"num_channels": 1}, "it has num_channels: 1"),
        (
            "idefics3", "preprocessor", {"max_image_size": {"longest_edge": 9}},
            "pictures have 3 x 3 patches, and the tower takes 6 x 6",
        ),
        ("internvl", "", {"downsample_ratio": 0.3}, "downsample_ratio is 0.3: tk supports 1 / n"),
        ("internvl", "", {"downsample_ratio": 0.125}, "divides the 4 patches of a tile's side"),
        ("internvl", "", {"vision_feature_layer": [1, 2]}, "supports one for internvl"),
        ("internvl", "", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strat"),
        ("internvl", "vision_config", {"use_mean_pooling": False}, "it has use_mean_pooling: fals"),
        ("internvl", "vision_config", {"norm_type": "x"}, "norm_type"),
        ("internvl", "vision_config", {"image_size": [16, 8]}, r"is \[16, 8\], and tk supports sq"),
        ("internvl", "preprocessor", {"size": {"height": 8, "width": 8}}, "2 x 2 patches, and the"),
        ("qwen2-vl", "preprocessor", {"merge_size": 1}, r"are \(4, 1\), and those of the tower"),
    ],
)  # fmt: skip
def test_settings_that_a_tower_lacks_are_refused(folder, tmp_path, name, part, changes, words):
    path = test_towers.renamed(folder(name), tmp_path / "m", str)
    is_config = part in ("", "vision_config")
    file = path / ("config.json" if is_config else f"{part}_config.json")
    raw = json.loads(file.read_text())
    (raw[part] if part == "vision_config" else raw).update(changes)
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=words):
        load_config(path) if is_config else LLM(str(path), **SETTINGS)


def test_other_towers_are_left_out(folder, tmp_path):
    path = test_towers.renamed(folder("llava"), tmp_path / "m", str)
    raw = json.loads((path / "config.json").read_text())
    raw["vision_config"] = {"model_type": "siglip_vision_model"}
    (path / "config.json").write_text(json.dumps(raw))
    assert load_config(path).sight is None
