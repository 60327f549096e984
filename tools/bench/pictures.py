"""Prompts with pictures: `python -m tools.bench.pictures FOLDER`, such as `models/qwen2.5-vl-7b`.

Each prompt has one new random picture of 1024 x 1024 pixels and 32 tokens of text. Prints the time
to the first token, of a picture and of the same again; answers of 64 tokens per second for 64
requests at once, and for the same again; and the longest pauses of 32 running answers, without
pictures and while 8 a second arrive."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.llm import LLM
from toolkit.sampling.params import SamplingParams

SIDE = 1024  # pixels
MANY, STREAMS, RATE, SECONDS = 64, 32, 8.0, 4.0
_random = np.random.default_rng()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    model = parser.parse_args().model
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": 32768}
    llm = LLM(model, **settings)
    assert llm.info.sight is not None, "the model reads text alone"
    token = llm.info.sight.token_id
    llm.generate([prompt(token)], answer(1), use_tqdm=False)
    first = sorted(seconds(llm, [prompt(token)], 1) for _ in range(12))
    print(f"first token: best {first[0] * 1000:.0f} ms, median {first[6] * 1000:.0f} ms")
    same = prompt(token)
    again = sorted(seconds(llm, [same], 1) for _ in range(6))
    print(f"the same again: {again[1] * 1000:.0f} ms")
    for _ in range(2):
        many = [prompt(token) for _ in range(MANY)]
        cold, warm = seconds(llm, many, 64), seconds(llm, many, 64)
        print(f"{MANY} at once: {MANY / cold:.1f} requests/s; again {MANY / warm:.1f}")
    llm.shutdown()
    asyncio.run(measure_pauses(model, token, settings))


def prompt(token: int) -> dict[str, Any]:
    """Return a new picture between 16 and 16 random tokens."""
    small = _random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    before, after = _random.integers(1000, 100_000, (2, 16)).tolist()
    picture = Image.fromarray(small).resize((SIDE, SIDE))
    return {
        "prompt_token_ids": [*before, token, *after],
        "multi_modal_data": {"image": picture},
    }


def answer(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def seconds(llm: LLM, prompts: list[Any], num_tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, answer(num_tokens), use_tqdm=False)
    return time.perf_counter() - start


async def measure_pauses(model: str, token: int, settings: dict[str, Any]) -> None:
    """Print the longest times between tokens of running answers."""
    async with AsyncLLM(model, **settings) as llm:
        async for _ in llm.generate(prompt(token), answer(1)):
            pass
        for rate in (0.0, RATE):
            pauses = np.sort(await pauses_at(llm, token, rate)) * 1000
            longest = ", ".join(f"{one:.1f}" for one in pauses[-5:])
            print(
                f"{rate:g} pictures/s: {STREAMS} answers wait {np.median(pauses):.1f} ms, at most "
                f"{longest} ms"
            )


async def pauses_at(llm: AsyncLLM, token: int, rate: float) -> list[float]:
    """Return all times between outputs of the answers, while pictures arrive."""
    pauses: list[float] = []
    end = time.perf_counter() + SECONDS + 1.0

    async def follow(outputs: AsyncIterator[Any]) -> None:
        last = 0.0
        async for _ in outputs:
            now = time.perf_counter()
            if last and end - now < SECONDS:
                pauses.append(now - last)
            last = now

    async def ask(given: dict[str, Any]) -> None:
        async for _ in llm.generate(given, answer(8)):
            pass

    ready = [prompt(token) for _ in range(int(rate * SECONDS))]
    streams = [
        asyncio.create_task(
            follow(llm.generate(_random.integers(1000, 100_000, 64).tolist(), answer(4000)))
        )
        for _ in range(STREAMS)
    ]
    await asyncio.sleep(1.0)
    asked = []
    for given in ready:
        asked.append(asyncio.create_task(ask(given)))
        await asyncio.sleep(1 / rate)
    await asyncio.sleep(max(0.0, end - time.perf_counter()))
    for stream in streams:
        stream.cancel()
        with suppress(asyncio.CancelledError):
            await stream
    await asyncio.gather(*asked)
    return pauses


if __name__ == "__main__":
    main()
