"""Tokenizers in GGUF files give llama.cpp's tokens. `gguf/`: written by tools/gguf_tokens.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.errors import CheckpointError
from toolkit.gguf.file import GGUF, read_gguf
from toolkit.gguf.tokenizer import build_tokenizer, generation_config
from toolkit.text.tokenizer import Tokenizer, load_tokenizer

FOLDER = Path(__file__).parent / "gguf_files"
WRITTEN = json.loads((FOLDER / "tokens.json").read_text())
KEEPS_MARKS = ("qwen2", "qwen35", "tekken", "gpt-4o")
"""Ways to split text in which the original tokenizers, unlike llama.cpp, compose a letter and its
accent (NFC), or keep them in one word."""
FILES = {"no prefix": "sentencepiece.gguf", "prefix": "sentencepiece.gguf"}


def changed(gguf: GGUF, /, **metadata: object) -> GGUF:
    entries = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return replace(gguf, metadata=gguf.metadata | entries)


@pytest.mark.parametrize("name", WRITTEN["tokens"])
def test_tokens_are_those_of_llama_cpp(name):
    model = read_gguf(FOLDER / FILES.get(name, "bpe.gguf"))
    if name in FILES:
        model = changed(model, add_space_prefix=name == "prefix")
    else:
        model = changed(model, pre=name)
    backend = build_tokenizer(model)
    for text, expected in zip(WRITTEN["texts"], WRITTEN["tokens"][name], strict=True):
        if "\u0301" not in text or name not in KEEPS_MARKS:
            assert backend.encode(text).ids == expected, text


@pytest.fixture(scope="module", params=["bpe.gguf", "sentencepiece.gguf"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = load_tokenizer(FOLDER / request.param)
    assert found is not None
    return found


def test_text_survives_encoding_and_decoding(tokenizer):
    for text in WRITTEN["texts"]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.decode(tokens, skip_special_tokens=False)
        assert decoded.replace(" ", "") == text.replace(" ", "")


def test_special_tokens_template_and_ends_come_from_the_metadata(tokenizer):
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert prompt == "<s>hi<|end|>"
    assert tokenizer.is_special_text("<|end|>")
    assert not tokenizer.is_special_text("<user>")
    assert tokenizer.encode("x")[0] == tokenizer.encode("<s>", add_special_tokens=False)[0]


@pytest.mark.parametrize("name", ["bpe.gguf", "sentencepiece.gguf"])
def test_end_tokens_are_eos_and_end_of_turn(name):
    model = read_gguf(FOLDER / name)
    tokens = model.get("tokenizer.ggml.tokens", list)
    kept = {key: value for key, value in model.metadata.items() if "eot" not in key}
    ends = generation_config(replace(model, metadata=kept))["eos_token_id"]
    assert {tokens[token] for token in ends} == {"</s>", "<|end|>"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"pre": "unheard-of"}, "unknown tokenizer.ggml.pre 'unheard-of'"),
        ({"model": "rwkv"}, "unsupported type 'rwkv'"),
        ({"token_type": [1, 1]}, "tokens and 2 types"),
        ({"model": "llama", "scores": [0.0]}, "and 1 scores"),
    ],
)
def test_unusable_tokenizer_is_refused(metadata, message):
    model = changed(read_gguf(FOLDER / "bpe.gguf"), **metadata)
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(model)
