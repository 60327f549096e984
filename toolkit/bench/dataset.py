"""What is asked: random prompts and lengths, the same for the same seed, different for every request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from toolkit.config.clients import BenchConfig

WARMUPS = 1 << 40  # warm-ups are numbered from here: they share no prompt with measured requests

WORDS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue side
    kind head house service friend father power hour game line end member law car city community name
    president team minute idea kid body information back parent face others level office door health person
    art war history party result change morning reason research girl guy moment air teacher force education
    foot boy age policy music market
""".split()  # noqa: SIM905  # a list of 106 literals reads worse


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, ready to send: a JSON body and the number of tokens that it asks for."""

    body: bytes
    max_tokens: int


class RandomDataset:
    """Prompts of random token ids (completions) or random words (chat)."""

    def __init__(self, config: BenchConfig, model: str) -> None:
        self.config = config
        self.model = model
        self.input_range = length_range(config.random_input_len, config.random_range_ratio)
        self.output_range = length_range(config.random_output_len, config.random_range_ratio)

    def request(self, index: int) -> BenchRequest:
        """The request of that number; it depends on the seed and the number alone."""
        rng = np.random.default_rng((self.config.seed, index))
        input_len = int(rng.integers(*self.input_range, endpoint=True))
        output_len = int(rng.integers(*self.output_range, endpoint=True))
        body: dict[str, Any] = {"model": self.model}
        if self.config.endpoint == "completions":
            body["prompt"] = rng.integers(0, self.config.random_vocab_size, input_len).tolist()
        else:
            words = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), input_len))
            body["messages"] = [{"role": "user", "content": words}]
        body |= {
            "max_tokens": output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.config.ignore_eos:
            body["ignore_eos"] = True
        return BenchRequest(orjson.dumps(body), output_len)


def length_range(length: int, ratio: float) -> tuple[int, int]:
    """Shortest and longest of lengths spread by `ratio` around `length`; at least one token."""
    return max(1, math.floor(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio)))
