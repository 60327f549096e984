"""Tokens of a drafter and its model, where one of them is a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gguf_writer import write
from toolkit.errors import ConfigError
from toolkit.lora.tokenizer import require_same_vocabulary

TOKENS = [f"t{i}" for i in range(400)]


def gguf(path: Path, tokens: list[str]) -> Path:
    return write(path, {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens}, {})


def folder(path: Path, tokens: list[str], kind: str = "BPE") -> Path:
    path.mkdir()
    ids = {token: id for id, token in enumerate(tokens[:-1])}
    vocab = [[token, 0.0] for token in tokens[:-1]] if kind == "Unigram" else ids
    added = [{"id": len(tokens) - 1, "content": tokens[-1]}]
    content = {"model": {"type": kind, "vocab": vocab}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "GGUF"])
def test_tokens_are_compared_with_those_of_a_gguf_file(tmp_path, caplog, kind):
    base = gguf(tmp_path / "base.gguf", [*TOKENS[:-3], "[PAD397]", *TOKENS[-2:], "[PAD400]"])

    def drafter(name: str, tokens: list[str]) -> Path:
        if kind == "GGUF":
            return gguf(tmp_path / f"{name}.gguf", tokens)
        return folder(tmp_path / name, tokens, kind)

    require_same_vocabulary(drafter("same", TOKENS), base)
    shifted = drafter("other", ["new", *TOKENS])
    for one, other in ((shifted, base), (base, shifted)):
        with pytest.raises(
            ConfigError, match=r"has other tokens than .*: \d+ of its 40[01] differ"
        ):
            require_same_vocabulary(one, other)
    assert not caplog.records
