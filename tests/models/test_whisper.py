"""Whisper: answers about clips equal Transformers', whatever is found, preempted or split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests import engines, hearing
from tests.hearing import (
    ENGLISH,
    GERMAN,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
)
from toolkit import LLM, SamplingParams
from toolkit.errors import ConfigError, InvalidRequestError
from toolkit.models.audio_encoder import LogMel, mel_filters
from toolkit.sampling.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("forked_processes")
COUNT = 20  # tokens of an answer
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
CLIPS = [hearing.sound(seed, length) for seed, length in enumerate((16000, 9001, 400, 16000, 1))]
PROMPTS = [[START], [PREVIOUS, *range(40, 62), START], [START, ENGLISH, START], [7, START]]
"""Prompts that end with the start: no rules change their answers."""
PAIRS = [(clip, PROMPTS[(3 * index + 1) % 4]) for index, clip in enumerate(CLIPS)]
PAIRS += [(CLIPS[0], PROMPTS[0]), (CLIPS[3], PROMPTS[0]), (CLIPS[0], PROMPTS[2])]
SMALL = {"num_gpu_blocks_override": 26, "max_model_len": 48}
"""Pages of 4 tokens: a clip has 13, and an answer up to 12."""
CASES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True, "max_num_batched_tokens": 8, "max_num_seqs": 3},
    {**SMALL, "num_gpu_blocks_override": 60, "swap_space": 0.0, "async_scheduling": True},
    {**SMALL, "num_gpu_blocks_override": 60, "swap_space": 0.001},
    {**SMALL, "enable_prefix_caching": False},
    {"tensor_parallel_size": 2, "max_num_batched_tokens": 16},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"attention_backend": "torch", "enforce_eager": True, "max_num_seqs": 2},
]  # fmt: skip


RULED = [
    (CLIPS[0], [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]),
    (CLIPS[1], [START, GERMAN, TRANSCRIBE]),
    (CLIPS[3], [START, ENGLISH, TRANSLATE]),
    (CLIPS[2], [PREVIOUS, 50, 60, 70, START, ENGLISH, TRANSCRIBE]),
    (CLIPS[4], [PREVIOUS, 50, START, GERMAN, TRANSLATE, NO_TIMESTAMPS]),
]
"""Clips and prompts whose answers have rules: two without timestamps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing.save(tmp_path_factory.mktemp("whisper"), **hearing.SUPPRESSED)


def ask(llm: LLM, pairs: list[tuple[hearing.Samples, list[int]]]) -> list[list[int]]:
    """Return the answers about clips."""
    prompts = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip, hearing.RATE)}}
        for clip, prompt in pairs
    ]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in results]


@pytest.mark.parametrize("mode", CASES, ids=str)
def test_answers_equal_transformers(folder, mode):
    """Cold, alone, and again. Several requests have the same clip."""
    model = hearing.reference()
    expected = [hearing.answer(model, *pair, COUNT) for pair in PAIRS]
    assert len({tuple(one) for one in expected}) == len(PAIRS)
    settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 6} | mode
    llm = LLM(str(folder), **settings)
    num_preempted = engines.count_stats(llm, "num_preemptions")
    num_found = engines.count_stats(llm, "mm_cache_hits")
    for order in (slice(None), slice(0, 1), slice(None, None, -1)):
        assert ask(llm, PAIRS[order]) == expected[order]
    assert (num_preempted() > 0) == (mode.get("num_gpu_blocks_override") == 60)
    assert (num_found() > 0) == mode.get("enable_prefix_caching", True)
    engines.scheduler(llm).check()
    llm.shutdown()


@pytest.mark.parametrize("mode", [{}, CASES[-2], {"enforce_eager": True, **SMALL}], ids=str)
def test_answers_with_rules_equal_transformers(folder, mode):
    """Suppressed tokens, and timestamps in pairs that do not decrease."""
    model = hearing.reference()
    expected = [hearing.answer(model, *pair, COUNT) for pair in RULED]
    timed = [sum(token >= hearing.FIRST_TIMESTAMP for token in one) for one in expected]
    assert min(timed[1:4]) > 2
    llm = LLM(str(folder), device="cpu", dtype="float32", block_size=4, **mode)
    pairs = RULED + PAIRS[:2]
    expected += [hearing.answer(model, *pair, COUNT) for pair in PAIRS[:2]]
    assert ask(llm, pairs) == expected
    llm.shutdown()


def test_several_cores_take_no_sound(folder):
    """Only a server gives them the bytes of clips."""
    llm = LLM(str(folder), device="cpu", data_parallel_size=2)
    with pytest.raises(InvalidRequestError, match="data_parallel_size"):
        ask(llm, PAIRS[:1])
    llm.shutdown()


def test_texts_may_have_more_pages_than_clips(folder):
    """A clip has 50 rows, and a text up to 64 tokens."""
    prompt = [PREVIOUS, *range(60, 98), START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
    answers = []
    for block_size in (4, 16):
        llm = LLM(str(folder), device="cpu", dtype="float32", block_size=block_size)
        answers.append(ask(llm, [(hearing.sound(0), prompt)]))
        llm.shutdown()
    assert answers[0] == answers[1]


def test_a_large_model_differs_in_each_size(tmp_path):
    """Sizes that are equal in Whisper's own models, and more bands, as large-v3 has."""
    model = hearing.reference(num_mel_bins=128, encoder_attention_heads=8, scale_embedding=False)
    llm = LLM(str(hearing.save(tmp_path, model)), device="cpu", dtype="float32")
    pairs = PAIRS[:3]
    assert ask(llm, pairs) == [hearing.answer(model, *pair, COUNT) for pair in pairs]
    llm.shutdown()


def test_spectrograms_equal_transformers():
    from transformers import WhisperFeatureExtractor

    for bands in (80, 128):
        extract = WhisperFeatureExtractor(bands, chunk_length=2)
        clip = np.concatenate((hearing.sound(3), np.zeros(hearing.WINDOW, np.float32)))
        expected = extract(clip, sampling_rate=hearing.RATE, return_tensors="np").input_features
        found = LogMel(bands)(torch.from_numpy(clip)[None])
        np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
        assert mel_filters(bands).shape == (bands, 201)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"pooling": "last"}, "--pooling"),
    ],
)
def test_settings_that_do_not_go_with_clips_are_refused(folder, settings, named):
    with pytest.raises(ConfigError, match=named):
        LLM(str(folder), device="cpu", **settings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [START]}, "transcribes sound"),
        ({"audio": np.zeros((2, 100), np.float32)}, "one channel"),
        ({"audio": np.zeros(100, np.int32)}, "int16 or floats"),
        ({"audio": np.zeros(16001, np.float32)}, "hears 1 s at once"),
        ({"audio": np.full(10, np.nan, np.float32)}, "not numbers"),
        ({"audio": np.zeros(0, np.float32)}, "without samples"),
        ({"audio": (np.zeros(10, np.float32), 0)}, "rate 0"),
        ({"audio": [np.zeros(10, np.float32)] * 2}, "has 2 sounds"),
        ({"audio": "speech.wav"}, "no NumPy array"),
        ({"image": []}, "transcribes sound"),
    ],
)
def test_wrong_prompts_are_refused(engine: Callable[..., LLM], folder, prompt, message):
    if "prompt_token_ids" not in prompt:
        prompt = {"prompt_token_ids": [START], "multi_modal_data": prompt}
    with pytest.raises(InvalidRequestError, match=message):
        engine(folder, dtype="float32").generate([prompt], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"allowed_token_ids": [5, 6]},
        {"structured_outputs": StructuredOutputsParams(choice=["a"])},
    ],
    ids=["allowed tokens", "structured output"],
)
def test_choices_of_tokens_exclude_timestamps(engine: Callable[..., LLM], folder, changes):
    llm = engine(folder, dtype="float32")
    sound = {"audio": (CLIPS[0], hearing.RATE)}
    timed = {"prompt_token_ids": [START, ENGLISH, TRANSCRIBE], "multi_modal_data": sound}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, **changes)
    with pytest.raises(InvalidRequestError, match=f"^{next(iter(changes))} excludes.*notimestamps"):
        llm.generate(timed, params, use_tqdm=False)
    if "allowed_token_ids" in changes:
        everything = replace(params, allowed_token_ids=list(range(llm.info.vocab_size)))
        (result,) = llm.generate(timed, everything, use_tqdm=False)
        assert result.outputs[0].token_ids[0] >= hearing.FIRST_TIMESTAMP
        for prompt in ([*timed["prompt_token_ids"], NO_TIMESTAMPS], [START]):
            (result,) = llm.generate({**timed, "prompt_token_ids": prompt}, params, use_tqdm=False)
            assert set(result.outputs[0].token_ids) <= {5, 6}


def test_models_that_do_not_hear_refuse_clips(engine: Callable[..., LLM]):
    prompt = {"prompt_token_ids": [5], "multi_modal_data": {"audio": (CLIPS[0], hearing.RATE)}}
    with pytest.raises(InvalidRequestError, match="does not hear"):
        engine("gpt2").generate([prompt], GREEDY, use_tqdm=False)


def test_sounds_of_other_rates_are_resampled(engine: Callable[..., LLM], folder):
    """A tone at 48 kHz is the tone at 16 kHz, but for its edges."""
    time = np.arange(48000) / 48000
    tone = (0.3 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    llm = engine(folder, dtype="float32")
    prompts = [
        {"prompt_token_ids": [START], "multi_modal_data": {"audio": sound}}
        for sound in ((tone, 48000), (tone[::3], 16000), ((tone[::3] * 32767).astype("i2"), 16000))
    ]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len({tuple(one.outputs[0].token_ids) for one in results}) == 1


def test_text_prompts_get_no_special_tokens(engine: Callable[..., LLM], folder):
    llm = engine(folder, dtype="float32")
    audio = {"multi_modal_data": {"audio": CLIPS[0]}}
    text = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    [result] = llm.generate([{"prompt": text, **audio}], GREEDY, use_tqdm=False)
    assert result.prompt_token_ids == [START, GERMAN, TRANSCRIBE, NO_TIMESTAMPS]


def test_show_says_that_sound_is_transcribed(folder, tk_here):
    shown = tk_here("show", str(folder)).stdout
    assert "sound          transcribed: see tk transcribe\n" in shown
    assert "sampling" not in shown
