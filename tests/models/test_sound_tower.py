"""Qwen3-ASR: prompts whose tokens stand for clips are answered as by Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests import asr, checkpoints, engines, hearing
from tests.seeing import TEXT_TEMPLATE
from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.errors import ConfigError, InvalidRequestError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.estimate import estimate
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")
LENGTHS = (16000, 100, 8000, 41234, 79999, 16160)
"""Samples: a chunk, shorter than the least, parts of chunks, and several windows."""
CLIPS = [hearing.sound(seed, length) for seed, length in enumerate(LENGTHS)]
PROMPTS = [([40 + i, 7, asr.SOUND, 99, i], [clip]) for i, clip in enumerate(CLIPS)]
PROMPTS += [([asr.SOUND, 5, asr.SOUND], [CLIPS[0], CLIPS[3]]), ([9, asr.SOUND], [CLIPS[0]])]
NAMES = {
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
    "model.audio_tower.": "thinker.audio_tower.",
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
}
"""Parts of names of Transformers, and of Qwen."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=asr.COUNT, ignore_eos=True)
CASES: list[dict[str, Any]] = [
    {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 3},
    {"num_gpu_blocks_override": 24, "enable_prefix_caching": False, "swap_space": 0.001},
    {"tensor_parallel_size": 2, "max_num_batched_tokens": 50},
    {"pipeline_parallel_size": 2, "async_scheduling": False},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
]


def ask(llm: LLM, prompts: list[tuple[list[int], list[hearing.Samples]]]) -> list[list[int]]:
    given = [
        {
            "prompt_token_ids": prompt,
            "multi_modal_data": {"audio": [(clip, hearing.RATE) for clip in clips]},
        }
        for prompt, clips in prompts
    ]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asr.save(tmp_path_factory.mktemp("asr"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), device="cpu", dtype="float32")
    yield made
    made.shutdown()


@pytest.mark.parametrize("mode", [{}, *CASES], ids=str)
def test_answers_equal_transformers(folder, mode):
    """Cold, alone, and again. Several requests have the same clip."""
    model = asr.reference()
    expected = [asr.answer(model, *one) for one in PROMPTS]
    assert len({tuple(one) for one in expected}) == len(PROMPTS)
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 6} | mode
    llm = LLM(str(folder), **settings)
    num_preempted = engines.count_stats(llm, "num_preemptions")
    for order in (slice(None), slice(0, 1), slice(None, None, -1)):
        assert ask(llm, PROMPTS[order]) == expected[order]
    assert (num_preempted() > 0) == ("num_gpu_blocks_override" in mode)
    engines.scheduler(llm).check()
    llm.shutdown()


def test_another_model_differs_in_each_size(tmp_path):
    audio = asr.SETTINGS["audio_config"] | {
        "num_mel_bins": 33, "encoder_layers": 1, "encoder_attention_heads": 2, "d_model": 24,
        "encoder_ffn_dim": 40, "n_window_infer": 300, "downsample_hidden_size": 8,
        "activation_function": "relu", "scale_embedding": True, "max_position_embeddings": 20,
    }  # fmt: skip
    text = asr.SETTINGS["text_config"] | {"tie_word_embeddings": True}
    model = asr.reference(audio_config=audio, text_config=text, tie_word_embeddings=True)
    llm = LLM(str(checkpoints.save(model, tmp_path)), device="cpu", dtype="float32")
    prompts = PROMPTS[2:7]
    assert ask(llm, prompts) == [asr.answer(model, *one) for one in prompts]
    llm.shutdown()


def test_checkpoints_of_qwen_are_read(tmp_path):
    """Their names and nesting, as Transformers' script converts them."""
    folder = asr.save(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    thinker = {name: raw.pop(name) for name in ("audio_config", "text_config", "audio_token_id")}
    del raw["tie_word_embeddings"]
    audio, text = thinker["audio_config"], thinker["text_config"]
    audio |= {"max_source_positions": 1500, "conv_chunksize": 500, "num_hidden_layers": 2}
    del audio["max_position_embeddings"]
    text |= {"model_type": "qwen3_asr_text", "num_experts": 128, "num_experts_per_tok": 8}
    rope = {"mrope_interleaved": True, "interleaved": True, "mrope_section": [3, 3, 2]}
    text["rope_parameters"] |= rope | {"type": "default"}
    raw |= {"thinker_config": thinker, "support_languages": ["German"]}
    (folder / "config.json").write_text(json.dumps(raw))
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for own, theirs in NAMES.items():
            name = name.replace(own, theirs)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    llm = LLM(str(folder), device="cpu", dtype="float32")
    model = asr.reference()
    assert ask(llm, PROMPTS[:2]) == [asr.answer(model, *one) for one in PROMPTS[:2]]
    llm.shutdown()


def test_sound_takes_its_place_in_chats(folder):
    """Between texts, for templates that read parts and for others. Chats with text alone work."""
    llm = LLM(str(folder), device="cpu", dtype="float32")
    parts = [{"type": "text", "text": "a"}, {"type": "audio", "audio": (CLIPS[0], hearing.RATE)}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}]
    place = [asr.AUDIO_START, *[asr.SOUND] * 13, asr.AUDIO_END]
    wanted = [asr.START, *llm.tokenize("user\na"), *place, *llm.tokenize("b"), asr.END]
    wanted += [*llm.tokenize("\n"), asr.START, *llm.tokenize("assistant\n")]
    template = {"chat_template": TEXT_TEMPLATE}
    assert llm.chat_prompt(messages) == llm.chat_prompt(messages, **template) == wanted
    [expected] = ask(llm, [(wanted, CLIPS[:1])])
    for options in ({}, template):
        [done] = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        assert list(done.outputs[0].token_ids) == expected
    text = llm.chat([{"role": "user", "content": "ab"}], GREEDY, use_tqdm=False)
    assert list(text[0].outputs[0].token_ids) != expected
    llm.shutdown()


@pytest.mark.parametrize(
    ("prompt", "sounds", "named"),
    [
        ([1, 2], [CLIPS[0]], "0 places for sound"),
        ([asr.SOUND, 1, asr.SOUND], [CLIPS[0]], "2 places for sound"),
        ([*[asr.SOUND] * 12, 5, asr.SOUND], [CLIPS[0]], "13 tokens"),
        ([asr.SOUND], [np.zeros(0, np.float32)], "without samples"),
        ([asr.SOUND], [np.zeros(25 * hearing.RATE, np.float32)], "25.0 s of audio"),
        ([asr.SOUND], ["a.wav"], "no NumPy array"),
    ],
)
def test_sound_that_does_not_fit_is_refused(llm, prompt, sounds, named):
    given = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": sounds}}
    with pytest.raises(InvalidRequestError, match=named):
        llm.generate(given, GREEDY, use_tqdm=False)


def test_prompts_with_sound_are_not_cut(llm):
    given = {"prompt_token_ids": [asr.SOUND], "multi_modal_data": {"audio": CLIPS[0]}}
    with pytest.raises(InvalidRequestError, match="could cut a clip"):
        llm.generate(given, SamplingParams(truncate_prompt_tokens=4), use_tqdm=False)


def test_adapters_are_refused(folder):
    with pytest.raises(ConfigError, match="LoRA"):
        LLM(str(folder), device="cpu", enable_lora=True)


def test_the_estimate_has_the_table_of_clips(folder):
    config = EngineConfig.from_settings(
        {"device": "cpu", "dtype": "float32", "mm_cache_gib": 0.001, "max_model_len": 100}
    )
    result = estimate(read_folder(folder, "asr"), config, find_device("cpu"))
    info = Worker(config, folder).start(lambda phase, seconds: None)
    sound = info.sound
    assert sound is not None
    assert result.pictures == sound.num_pages * 64 * 48 * 4
    assert result.num_blocks == info.num_blocks
    assert result.num_parameters == info.num_parameters
    assert sound.seconds == 7.0
