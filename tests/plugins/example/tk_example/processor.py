"""A logits processor: an answer that begins with given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import msgspec

from toolkit.sampling.logits_processors import LogitsProcessor, Row

if TYPE_CHECKING:
    import torch  # not at run time: front ends check arguments, and need no torch


class Arguments(msgspec.Struct):
    script: list[int]


class Script(LogitsProcessor[Arguments]):
    @classmethod
    def check(cls, arguments: Arguments, vocab_size: int) -> None:
        if not all(0 <= token < vocab_size for token in arguments.script):
            raise ValueError(f"script must have tokens from 0 to {vocab_size - 1}")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row[Arguments]]) -> torch.Tensor:
        for index, row in enumerate(rows):
            script, position = row.arguments.script, row.num_output_tokens
            if position < len(script):
                logits[index].fill_(-inf)
                logits[index, script[position]] = 0.0
        return logits
