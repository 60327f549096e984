"""100 requests at random times, with random aborts and disconnects, on a tiny block pool.

Every request ends as expected, all blocks are freed, and memory does not grow.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.api.conftest import Reference
from tests.server import Server, until
from toolkit import AsyncLLM, SamplingParams
from toolkit.errors import InvalidRequestError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 100
ARRIVALS = 0.2  # seconds in which all tasks arrive: their requests overlap on any machine
MEMORY = 2**20  # bytes that the core may grow by, in COUNT requests after the warm-up
POOL = {"num_gpu_blocks_override": 24, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64}
"""96 tokens for eight requests of up to 64 each."""
MAX_TOKENS = 28  # of an answer
SHARED = "Shared beginning. "
PROMPTS = [SHARED + word for word in ("a", "bb", "ccc", "a dddd", "a dddd eeeee")] + [
    "",
    "x",
    "yz" * 9,
    "f" * 33,
    "gh i" * 8,
]


@dataclass(frozen=True)
class Task:
    """A request and its fate."""

    prompt: str
    max_tokens: int
    fate: str
    patience: int  # tokens after which its client leaves
    at: float


def tasks(seed: int, count: int) -> list[Task]:
    rng = random.Random(seed)
    fates = ["greedy"] * 5 + ["sampled", "pair", "abort", "leave", "leave at once"]

    def task() -> Task:
        fate = rng.choice(fates)
        # Clients that leave ask for many tokens, so that the request still runs on any machine.
        max_tokens = (
            MAX_TOKENS
            if fate in ("abort", "leave", "leave at once")
            else rng.randint(4, MAX_TOKENS)
        )
        patience, at = rng.randint(1, 3), rng.uniform(0.0, ARRIVALS * count / COUNT)
        return Task(rng.choice(PROMPTS) or "\n", max_tokens, fate, patience, at)

    return [task() for _ in range(count)]


def memory(process: psutil.Process) -> int:
    return process.memory_info().rss


async def run_all(one: Callable, seed: int, count: int) -> Counter[str]:
    """Run tasks at their times. Returns the number of tasks by fate."""

    async def later(task: Task) -> None:
        await asyncio.sleep(task.at)
        async with asyncio.timeout(300):
            await one(task)

    made = tasks(seed, count)
    async with asyncio.TaskGroup() as group:
        for task in made:
            group.create_task(later(task))
    return Counter(task.fate for task in made)


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the kernel caches of oneDNN and PyTorch, so that only the engine's memory is measured.

    They keep 1024 kernels, one per number of tokens in a step: memory grows for thousands of
    requests, up to a limit.
    """
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1")


@pytest_asyncio.fixture
async def llm(model: Path, forked_processes: None):
    async with AsyncLLM(str(model), num_threads=1, swap_space=0.001, **POOL) as llm:
        yield llm


async def test_an_engine_with_swap_space_survives_the_soak(
    llm: AsyncLLM, reference: Reference
) -> None:
    ends: Counter[str] = Counter()

    async def one(task: Task) -> None:
        greedy = task.fate != "sampled"
        params = SamplingParams(
            n=2 if task.fate == "pair" else 1,
            temperature=0.0 if greedy else 1.0,
            seed=5,
            max_tokens=task.max_tokens,
            ignore_eos=True,
        )
        output = None
        async for output in llm.generate(task.prompt, params):
            if task.fate == "leave at once" or (
                task.fate == "leave" and len(output.outputs[0].token_ids) >= task.patience
            ):
                return
            if task.fate == "abort" and len(output.outputs[0].token_ids) >= task.patience:
                llm.abort(output.request_id)
        expected = list(reference.tokens(task.prompt, task.max_tokens))
        for answer in output.outputs:
            ends[answer.finish_reason] += 1
            if task.fate == "abort" and answer.finish_reason == "abort":
                expected = expected[: len(answer.token_ids)]
            if greedy:
                assert answer.token_ids == expected
            assert len(answer.token_ids) == len(expected)

    await run_all(one, 1, COUNT // 3)  # warm up caches and allocators
    core = next(
        p for p in psutil.Process().children() if "toolkit.engine.cores.core_process" in p.cmdline()
    )
    before, ends = memory(core), Counter()
    fates = await run_all(one, 2, COUNT)
    assert llm.num_unfinished == 0
    await wait_until_idle(llm)
    assert memory(core) - before < MEMORY
    assert ends["length"] >= fates["greedy"] + fates["sampled"] + 2 * fates["pair"]
    assert ends.keys() == {"length", "abort"}  # a busy client may see only the end of many
    assert value(llm, "num_preemptions_total") > 20, "the pool was not small enough"
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for prompt in PROMPTS[:5]:  # the prefix cache is correct
        outputs = [output async for output in llm.generate(prompt, greedy)]
        assert outputs[-1].outputs[0].token_ids == list(reference.tokens(prompt, 24))
    stream = await llm.submit("x", greedy, request_id="twice")
    with pytest.raises(InvalidRequestError, match="twice"):
        await llm.submit("y", greedy, request_id="twice")
    assert sum([len(delta.token_ids) async for delta in stream]) == 24


def value(llm: AsyncLLM, name: str) -> float:
    labels = {"model_name": str(llm.config.model.model), "engine": "0"}
    found = llm.metrics.registry.get_sample_value(f"tk:{name}", labels)
    assert found is not None
    return found


async def wait_until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while any(
            value(llm, n)
            for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ):
            await asyncio.sleep(0.02)


async def lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Yield lines. httpx's own end at U+0085 and U+2028, too, which the model may say."""
    rest = b""
    async for part in answer.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for one in whole:
            yield one.decode()


async def test_a_server_survives_disconnects(
    start: Callable[..., Server], model: Path, reference: Reference
) -> None:
    flags = [
        part
        for name, number in POOL.items()
        for part in (f"--{name.replace('_', '-')}", str(number))
    ]
    server = start(*flags, model=model)
    limits = httpx.Limits(max_connections=None)

    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:

        async def one(task: Task) -> None:
            body = {
                "prompt": task.prompt,
                "max_tokens": task.max_tokens,
                "ignore_eos": True,
                "temperature": 1 if task.fate == "sampled" else 0,
                "n": 2 if task.fate == "pair" else 1,
                "stream": task.fate != "pair",
            }
            if body["stream"] and task.fate != "leave at once":
                body["stream_options"] = {"include_usage": True}
            expected = reference.text(task.prompt, task.max_tokens)
            if task.fate == "pair":
                answer = (await http.post("/v1/completions", json=body)).json()
                assert [c["text"] for c in answer["choices"]] == [expected] * 2
                return
            if task.fate == "leave at once":
                request = asyncio.create_task(
                    http.post("/v1/completions", json=body | {"stream": False})
                )
                await asyncio.sleep(0.002 * task.patience)
                request.cancel()
                await asyncio.wait([request])
                return
            text, events, usage = "", 0, None
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in lines(answer):
                    if line in ("", "data: [DONE]"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk["usage"]
                    if usage is not None:
                        continue
                    events += 1  # an event may have several tokens if the client is slow
                    text += chunk["choices"][0]["text"]
                    if task.fate in ("abort", "leave") and events == task.patience:
                        assert expected.startswith(text)
                        return
            assert usage["completion_tokens"] == task.max_tokens >= events
            if task.fate == "greedy":
                assert text == expected

        await run_all(one, 3, COUNT // 3)
        before = memory(server.core), memory(psutil.Process(server.pid))
        fates = await run_all(one, 4, COUNT)
        after = memory(server.core), memory(psutil.Process(server.pid))
    assert fates["greedy"] > COUNT / 3
    assert fates["leave"] + fates["leave at once"] > COUNT / 10
    with server.slowly():  # a busy client above may have left too late
        for _ in range(5):
            leave_after_a_token(server)
    until(server.is_idle)
    assert server.metric("tk:num_preemptions_total") > 20, "the pool was not small enough"
    assert server.metric("tk:request_success_total", finished_reason="abort") >= 5
    assert server.metric("tk:request_success_total", finished_reason="error") == 0
    assert after[0] - before[0] < MEMORY
    # The front end's buffers of connections vary in size.
    assert after[1] - before[1] < 4 * MEMORY
    assert server.http.get("/health").status_code == 200


def leave_after_a_token(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
