"""Clips of 30 s: `python -m tools.bench.speech FOLDER`, such as `models/whisper-large-v3`.

Each clip is new noise, and each answer has 100 tokens. Prints seconds of sound per second for 256
clips at once, and for the same again; for one clip alone, and the time to its first token.

Over HTTP: `tk bench --endpoint transcriptions`."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.engine.llm import LLM
from toolkit.sampling.params import SamplingParams

MANY, SECONDS, RATE, LENGTH = 256, 30, 16_000, 100
_random = np.random.default_rng()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clips", type=int, default=MANY)
    asked = parser.parse_args()
    measure(asked.model, asked.clips)


def measure(model: str, num_clips: int) -> None:
    llm = LLM(model, load_format="dummy", max_num_seqs=num_clips)
    assert llm.info.hearing is not None, "the model does not hear"
    start = llm.info.hearing.tokens.prompt()
    seconds(llm, [prompt(start)], 1)
    first = sorted(seconds(llm, [prompt(start)], 1) for _ in range(12))
    print(f"first token: best {first[0] * 1000:.1f} ms, median {first[6] * 1000:.1f} ms")
    alone = sorted(seconds(llm, [prompt(start)], LENGTH) for _ in range(6))
    print(f"one clip: {SECONDS / alone[2]:.0f} times real time, {alone[2] * 1000:.1f} ms")
    for _ in range(2):
        many = [prompt(start) for _ in range(num_clips)]
        cold, again = seconds(llm, many, LENGTH), seconds(llm, many, LENGTH)
        whole = num_clips * SECONDS
        print(f"{num_clips} at once: {whole / cold:.0f} times real time; again {whole / again:.0f}")
    llm.shutdown()


def noise() -> npt.NDArray[np.int16]:
    return _random.integers(-3000, 3000, SECONDS * RATE, dtype=np.int16)


def prompt(start: list[int]) -> dict[str, Any]:
    """Return a prompt with a new clip."""
    return {"prompt_token_ids": start, "multi_modal_data": {"audio": (noise(), RATE)}}


def seconds(llm: LLM, prompts: list[Any], num_tokens: int) -> float:
    """Return how long answers of so many tokens take."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
