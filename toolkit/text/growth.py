"""Refuse normalizers of tokenizer.json that make a long text of a short one."""

import base64
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

MAX_GROWTH = 4096
"""Characters that may replace one match. Unicode's own rules make up to 18 of one."""


def check_growth(normalizer: Mapping[str, Any]) -> None:
    """Raise ValueError if one match of a rule can become more than MAX_GROWTH characters.

    normalizer: as in tokenizer.json; its rules apply one after the other. A match of a regular
    expression counts as one character."""
    rules = list(_rules(normalizer))
    for number, (_, made) in enumerate(rules):
        text, factor = made, 1
        for pattern, content in rules[number + 1 :]:
            if pattern:
                growth = text.count(pattern) * (len(content) - len(pattern))
                if len(text) + growth <= MAX_GROWTH:
                    text = text.replace(pattern, content)
                    continue
            factor *= max(1, len(content))
        if len(text) * factor > MAX_GROWTH:
            raise ValueError(f"its normalizer makes over {MAX_GROWTH} characters of one")


def _rules(normalizer: Mapping[str, Any]) -> Iterator[tuple[str | None, str]]:
    """Yield (text to replace, replacement) in order. None: a regular expression."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        yield from itertools.chain.from_iterable(map(_rules, normalizer["normalizers"]))
    elif kind == "Replace":
        yield normalizer["pattern"].get("String"), normalizer["content"]
    elif kind == "Precompiled":
        yield None, _longest(base64.b64decode(normalizer["precompiled_charsmap"])) * "x"


def _longest(rules: bytes) -> int:
    """Return the length of the longest replacement in SentencePiece's compiled rules.

    They are the size of a trie in four bytes, the trie, and the replacements, each with a zero byte
    at its end (sentencepiece, src/normalizer.cc)."""
    start = 4 + int.from_bytes(rules[:4], "little")
    return max(map(len, rules[start:].split(b"\0")), default=0)
