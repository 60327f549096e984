"""Special tokens of transcriptions are found in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ctranslate2_writer
from toolkit.errors import CheckpointError
from toolkit.speech.model_tokens import find_speech_tokens

NAMES = [
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|haw|>", "<|translate|>"),
    *("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
]
CONFIG = {
    "vocab_size": 60,
    "decoder_layers": 4,
    "decoder_attention_heads": 2,
    "max_source_positions": 1500,
}
GENERATION = {
    "eos_token_id": 40,
    "decoder_start_token_id": 41,
    "prev_sot_token_id": 47,
    "no_timestamps_token_id": 49,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 42, "<|haw|>": 43},
    "task_to_id": {"transcribe": 45, "translate": 44},
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3, 40],
    "alignment_heads": [[2, 1], [3, 0]],
    "max_initial_timestamp_index": 5,
}


def write(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    names: list[str] | None = None,
    first: int = 40,
) -> Path:
    """Write a folder. names: of the tokenizer's added tokens, from id `first` on."""
    added = [{"id": id, "content": name} for id, name in enumerate(names or [], first)]
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_generation_config_has_the_tokens(tmp_path):
    found = find_speech_tokens(write(tmp_path, generation=GENERATION))
    tokens = found.tokens
    assert (tokens.end, tokens.start, tokens.previous) == (40, 41, 47)
    assert (tokens.no_speech, tokens.no_timestamps, tokens.first_timestamp) == (48, 49, 50)
    assert tokens.languages == {"en": 42, "haw": 43}
    assert (tokens.transcribe, tokens.translate) == (45, 44)
    assert tokens.suppressed == (1, 2)
    assert tokens.first_suppressed == (3, 40)
    assert tokens.most_initial_timestamp == 5
    assert found.alignment_heads == ((2, 1), (3, 0))
    assert found.seconds == 30


@pytest.mark.parametrize("no_speech", ["<|nospeech|>", "<|nocaptions|>"])
def test_tokenizer_has_the_tokens_of_older_models(tmp_path, no_speech):
    first = 51865 - len(NAMES) - 1
    names = [no_speech if name == "<|nospeech|>" else name for name in NAMES]
    own = {"vocab_size": 51865, "suppress_tokens": [7], "begin_suppress_tokens": None}
    found = find_speech_tokens(write(tmp_path, config=own, names=names, first=first))
    tokens = found.tokens
    place = {name: first + nth for nth, name in enumerate(names)}
    assert tokens.end == place["<|endoftext|>"]
    assert tokens.start == place["<|startoftranscript|>"]
    assert tokens.previous == place["<|startofprev|>"]
    assert tokens.no_speech == place[no_speech]
    assert tokens.first_timestamp == place["<|notimestamps|>"] + 1
    assert tokens.languages == {"en": place["<|en|>"], "haw": place["<|haw|>"]}
    assert tokens.translate == place["<|translate|>"]
    assert tokens.suppressed == (7,)
    assert tokens.first_suppressed == ()
    assert tokens.most_initial_timestamp == 50
    assert found.alignment_heads == ((2, 0), (2, 1), (3, 0), (3, 1))


@pytest.mark.parametrize("generation", [None, {"is_multilingual": False}])
def test_english_models_have_no_languages(tmp_path, generation):
    tokens = find_speech_tokens(write(tmp_path, generation=generation, names=NAMES)).tokens
    assert not tokens.is_multilingual
    assert tokens.languages == {}
    assert tokens.transcribe == tokens.translate == -1
    assert tokens.prompt() == [41, 49]


def test_ctranslate2_folder_has_the_tokens(tmp_path):
    tensors = ctranslate2_writer.whisper_tensors()
    found = find_speech_tokens(ctranslate2_writer.write(tmp_path, tensors))
    assert (found.tokens.end, found.tokens.start, found.tokens.first_timestamp) == (20, 21, 30)
    assert found.tokens.suppressed == (1, 2)
    assert found.alignment_heads == ((1, 0),)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"no_timestamps_token_id": None}, r"lacks no_timestamps_token_id.* <\|notimestamps\|>"),
        ({"eos_token_id": None}, r"no token <\|endoftext\|>"),
        ({"eos_token_id": 60}, "eos_token_id is 60, which is not the id of one of 60"),
        ({"no_timestamps_token_id": 59}, r"<\|0.00\|> is 60"),
        ({"lang_to_id": None}, "such as <.en.>"),
        ({"lang_to_id": [1]}, "lang_to_id is .1., which is not an object"),
        ({"task_to_id": {}}, r"no token <\|transcribe\|>"),
        ({"suppress_tokens": [-1]}, "suppress_tokens is -1"),
        ({"suppress_tokens": "all"}, "suppress_tokens is 'all', which is not a list"),
        ({"max_initial_timestamp_index": "a"}, "max_initial_timestamp_index is 'a'"),
        ({"alignment_heads": [[4, 0]]}, "which is not pairs of one of 4 layers and 2 heads"),
    ],
)
def test_wrong_tokens_are_one_clear_error(tmp_path, change, problem):
    with pytest.raises(CheckpointError, match=problem):
        find_speech_tokens(write(tmp_path, generation=GENERATION | change))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[1]", "{", '{"added_tokens": [1]}'])
def test_unreadable_files_are_one_clear_error(tmp_path, name, content):
    write(tmp_path, generation=GENERATION)
    if name == "generation_config.json" and content.startswith('{"'):
        content = '{"eos_token_id": true}'
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError):
        find_speech_tokens(tmp_path)
