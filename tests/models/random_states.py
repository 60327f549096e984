"""Random requests to a model with states or windows, compared with a run without caching.

The suite asks 300. A soak asks more, and kills the core every so many. Preempted requests are
recomputed in a half of it, and swapped in the other, as far as the host has room:

    python -m tests.models.random_states --requests 10000 --kill-every 3000 --drafts

A core that ends four times, each within a minute, is not started again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil

from tests import checkpoints
from tests.models.architectures import ARCHITECTURES
from tests.references import Reference
from toolkit import LLM, AsyncLLM, SamplingParams
from toolkit.engine.front.input_processor import InputProcessor

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_cache_memory": 1.0}
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "state_cache_gib": 1e-4,
    "max_model_len": 448,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 90,
}
"""Too few blocks and snapshots for all requests."""
SWAP: dict[str, Any] = SMALL | {"swap_space": 0.0002}
"""The host has room for some of the preempted requests."""
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
CLIENTS = 24
Request = tuple[list[int], SamplingParams]


def hybrid() -> Reference:
    """Return a decoder with gated delta nets and attention, MLPs and experts."""
    family, settings = ARCHITECTURES["qwen3-next"]
    longer = {"max_position_embeddings": 512, "linear_num_value_heads": 4, "decoder_sparse_step": 2}
    return checkpoints.make_model(family, settings | longer)


def windows() -> Reference:
    """Return a decoder whose layers keep windows of 40 tokens, and all tokens in every third."""
    family, settings = ARCHITECTURES["gemma3"]
    longer = {"max_position_embeddings": 512, "sliding_window": 40}
    return checkpoints.make_model(family, settings | longer)


MODELS = {"hybrid": hybrid, "windows": windows}


def random_requests(count: int, seed: int) -> list[Request]:
    """Return requests whose prompts form a tree."""
    chance = random.Random(seed)
    words = [[chance.randrange(250) for _ in range(chance.randrange(20, 90))] for _ in range(6)]
    requests = []
    for _ in range(count):
        parts = words[: chance.randrange(4)] + [chance.choice(words) for _ in range(2)]
        prompt = [token for part in parts for token in part][: chance.randrange(20, 330)]
        tokens = chance.choice((1, 5, 20, 66))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        requests.append((prompt, params))
    return requests


def with_predictions(requests: list[Request], answers: list[list[int]]) -> list[Request]:
    """Return requests that predict their answers, with some wrong tokens.

    `predictions_are_ids` has the engine take them."""
    chance, found = random.Random(0), []
    for (prompt, params), answer in zip(requests, answers, strict=True):
        guess = [token if chance.random() < 0.8 else chance.randrange(250) for token in answer]
        prediction = " ".join(map(str, guess))
        found.append((prompt, msgspec.structs.replace(params, prediction=prediction)))
    return found


@contextmanager
def predictions_are_ids() -> Iterator[None]:
    """Take the words of predictions as token ids."""

    def ids(_: InputProcessor, text: str | None) -> list[int]:
        return [*map(int, text.split())] if text else []

    with mock.patch.object(InputProcessor, "_tokenize_prediction", ids):
        yield


def answers(llm: LLM, requests: list[Request]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    found = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def answers_alone(
    folder: Path, requests: list[Request], settings: dict[str, Any] = SETTINGS
) -> list[list[int]]:
    llm = LLM(str(folder), **settings, max_num_seqs=16, enable_prefix_caching=False)
    found = answers(llm, requests)
    llm.shutdown()
    return found


async def answers_of_clients(
    folder: Path,
    requests: list[Request],
    limits: dict[str, Any],
    *,
    kill_every: int,
    seed: int,
    settings: dict[str, Any] = SETTINGS,
) -> list[list[int]]:
    """Return the tokens that clients got, some of whom left early. Kill the core meanwhile."""
    chance, clients = random.Random(seed), asyncio.Semaphore(CLIENTS)
    leaves = [chance.randrange(1, 20) if chance.random() < 0.2 else 0 for _ in requests]
    done = 0

    async def ask(llm: AsyncLLM, index: int) -> list[int]:
        nonlocal done
        prompt, params = requests[index]
        tokens: list[int] = []
        async with clients:
            async for output in llm.generate({"prompt_token_ids": prompt}, params):
                tokens = list(output.outputs[0].token_ids)
                if leaves[index] and len(tokens) >= leaves[index]:
                    break
        done += 1
        if done % kill_every == 0:
            psutil.Process(llm.replicas[0].link.pid).kill()
        return tokens

    async with AsyncLLM(str(folder), **settings, **limits) as llm:
        return await asyncio.gather(*(ask(llm, index) for index in range(len(requests))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kill-every", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="hybrid")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    requests = random_requests(given.requests, given.seed)
    half, found = len(requests) // 2, list[list[int]]()
    settings = SETTINGS if given.device == "cpu" else ON_GPU
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as path:
        folder = checkpoints.save(MODELS[given.model](), Path(path))
        expected = answers_alone(folder, requests, settings)
        if given.drafts:
            requests = with_predictions(requests, expected)
        for limits, some in ((SMALL, requests[:half]), (SWAP, requests[half:])):
            limits = limits | DRAFTS if given.drafts else limits
            kills = {"kill_every": given.kill_every, "seed": given.seed}
            clients = answers_of_clients(folder, some, limits, settings=settings, **kills)
            with predictions_are_ids():
                found += asyncio.run(clients)
    num_kills = sum(count // given.kill_every for count in (half, len(requests) - half))
    left = sum(len(a) < len(b) for a, b in zip(found, expected, strict=True))
    wrong = [i for i, one in enumerate(found) if not one or one != expected[i][: len(one)]]
    print(
        f"{len(requests):,} requests, {left:,} left early, {num_kills} "
        f"kills, {time.monotonic() - begin:.0f} s: {len(wrong)} differ {wrong[:10]}"
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
