"""Chats with pictures: `python -m tools.bench.pictures_http FOLDER`, such as `qwen2.5-vl-7b`.

The rows of `tools.bench.pictures` over HTTP: each picture is a JPEG file in a data URL. In addition
the longest pauses of one running answer, alone and while JPEG files of 12 megapixels arrive, which
a second server resizes to one megapixel: what they take besides the tower and the prompt."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import time
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
from PIL import Image

from toolkit.bench.load.http_client import HTTPClient
from tools.bench.pictures import MANY, RATE, SECONDS, SIDE, STREAMS
from tools.bench.server_process import run_server

LARGE = 4000, 3000  # pixels
WORDS = 26  # of the text next to a picture: about 32 tokens
_random = np.random.default_rng()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    model = parser.parse_args().model
    arguments = [model, "--load-format", "dummy", "--max-model-len", "32768"]
    with run_server(arguments) as server:
        asyncio.run(measure(str(server.client.base_url)))
    arguments += ["--mm-processor-kwargs", f'{{"max_pixels": {SIDE**2}}}']
    with run_server(arguments) as server:
        asyncio.run(measure_large(str(server.client.base_url)))


async def measure(url: str) -> None:
    async with HTTPClient(url, None) as http:
        await seconds(http, [picture_chat(1)])
        first = sorted([await seconds(http, [picture_chat(1)]) for _ in range(12)])
        print(f"first token: best {first[0] * 1000:.0f} ms, median {first[6] * 1000:.0f} ms")
        for _ in range(2):
            many = [picture_chat(64) for _ in range(MANY)]
            cold, warm = await seconds(http, many), await seconds(http, many)
            print(f"{MANY} at once: {MANY / cold:.1f} requests/s; again {MANY / warm:.1f}")
        for rate in (0.0, RATE):
            ready = [picture_chat(8) for _ in range(int(rate * SECONDS))]
            show(f"{rate:g} pictures/s", STREAMS, await pauses(http, STREAMS, ready, rate))


async def measure_large(url: str) -> None:
    async with HTTPClient(url, None) as http:
        await seconds(http, [picture_chat(1)])
        for size, rate in ((SIDE, SIDE), 0.0), ((SIDE, SIDE), 2.0), (LARGE, 2.0):
            ready = [picture_chat(1, size) for _ in range(int(rate * SECONDS))]
            name = f"{rate:g} pictures of {size[0]} x {size[1]} a second"
            show(name, 1, await pauses(http, 1, ready, rate))


def picture_chat(num_tokens: int, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Return the body of a chat with a new picture."""
    small = _random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(size).save(file, "JPEG", quality=90)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    return chat([text(), {"type": "image_url", "image_url": {"url": url}}], num_tokens)


def text() -> dict[str, str]:
    letters = _random.integers(97, 123, (WORDS, 2), dtype=np.uint8)
    return {"type": "text", "text": " ".join(bytes(pair).decode() for pair in letters)}


def chat(parts: list[dict[str, Any]], num_tokens: int) -> bytes:
    messages = [{"role": "user", "content": parts}]
    settings = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return orjson.dumps({"messages": messages, **settings})


async def seconds(http: HTTPClient, bodies: list[bytes]) -> float:
    """Return the time until all answers have ended."""
    start = time.perf_counter()
    await asyncio.gather(*(ask(http, body) for body in bodies))
    return time.perf_counter() - start


async def ask(http: HTTPClient, body: bytes) -> list[float]:
    """Return the times at which parts of an answer arrived."""
    times: list[float] = []
    status, problem = await http.post(
        "/v1/chat/completions", body, lambda _, read_at: times.append(read_at)
    )
    assert status == 200, problem
    return times


async def pauses(
    http: HTTPClient, num_streams: int, ready: list[bytes], rate: float
) -> np.ndarray[Any, Any]:
    """Return all times in ms between parts of running answers, while `ready` are sent."""
    pauses: list[float] = []
    end = time.perf_counter() + SECONDS + 1.0

    async def follow() -> None:
        last = 0.0

        def take(_: bytes, read_at: float) -> None:
            nonlocal last
            if last and 0 < end - read_at < SECONDS:
                pauses.append(read_at - last)
            last = read_at

        await http.post("/v1/chat/completions", chat([text()], 4000), take)

    streams = [asyncio.create_task(follow()) for _ in range(num_streams)]
    await asyncio.sleep(1.0)
    asked = []
    for body in ready:
        asked.append(asyncio.create_task(ask(http, body)))
        await asyncio.sleep(1 / rate)
    await asyncio.sleep(max(0.0, end - time.perf_counter()))
    for stream in streams:
        stream.cancel()
        with suppress(asyncio.CancelledError):
            await stream
    await asyncio.gather(*asked)
    return np.sort(pauses) * 1000


def show(name: str, num_streams: int, pauses: np.ndarray[Any, Any]) -> None:
    longest = ", ".join(f"{one:.1f}" for one in pauses[-5:])
    print(f"{name}: {num_streams} answers wait {np.median(pauses):.1f} ms, at most {longest} ms")


if __name__ == "__main__":
    main()
