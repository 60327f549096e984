"""Time the engine's loop on the host, without a model: `python -m tools.bench.loop`.

Scheduler, core and output path run with an executor that returns random tokens at once. The table
has the microseconds of a decode step by the number of running requests. The lines below it are
complete batches through `LLM.generate`, with prompts, stops and text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from statistics import fmean, median
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from toolkit.config import EngineConfig
from toolkit.demo import MODEL_DIR
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.core import EngineCore
from toolkit.engine.cores.core_client import CoreClient
from toolkit.engine.front.input_processor import InputProcessor, Prompt
from toolkit.engine.llm import LLM
from toolkit.engine.messages import EngineOutputs, EngineRequest, ToCore
from toolkit.executor import Executor, Pending
from toolkit.sampling.grammar import Masks
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.scheduler.output import record_length
from toolkit.text.tokenizer import load_tokenizer
from toolkit.worker import WorkerInfo
from toolkit.worker.operations import Operation

P = ParamSpec("P")
T = TypeVar("T")

BATCHES = (1, 4, 16, 64, 256, 1024)
VOCAB_SIZE = 2048
BLOCK_SIZE = 16
MOST_LOGPROBS = 20
MAX_MODEL_LEN = 1024
PARTS = ("schedule", "update", "core", "encode", "decode", "process")
CORE_SIDE = PARTS[:4]
"""Parts that run in the core's process; the others run in the front end."""

WARM_UP = 20
REPEATS = 3


class RandomTokens(Executor):
    """Returns random tokens, and records of log-probabilities, at once and without a model."""

    def __init__(self, max_num_seqs: int) -> None:
        self.info = WorkerInfo(
            device="none",
            dtype="none",
            weight_type="none",
            attention_backend="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=8192,
            num_blocks=max_num_seqs * MAX_MODEL_LEN // BLOCK_SIZE,
            num_host_blocks=0,
            cache_tokens=max_num_seqs * MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_parameters=0,
            weight_bytes=0,
            cache_bytes=0,
            async_scheduling=True,
        )
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(3, VOCAB_SIZE, 1 << 16, dtype=np.int32)
        shape = 1 << 12, record_length(MOST_LOGPROBS)
        self._records = rng.integers(3, VOCAB_SIZE, shape, dtype=np.int32)
        self._records[:, 2::2] = (-rng.random(self._records[:, 2::2].shape, np.float32)).view(
            np.int32
        )
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)

    def execute(self, step: SchedulerOutput) -> Pending:
        for new in step.new_rows:
            k = new.spec.params.logprobs
            self._num_logprobs[new.row] = -1 if k is None else k
        count = int(np.count_nonzero(step.samples))
        start = step.step * 97 % (len(self._tokens) - count)
        output = ModelOutput(step.step, self._tokens[start : start + count])
        k = int(self._num_logprobs[step.rows[step.samples]].max(initial=-1))
        if k >= 0:
            start %= len(self._records) - count
            records = self._records[start : start + count, : record_length(k)].copy()
            records[:, 1] = output.token_ids
            output.logprobs = records
        return _Completed(output)

    def operate(self, operation: Operation) -> Future[None]:
        raise NotImplementedError

    def collective(self, method: str, *args: Any) -> list[Any]:
        return []

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _Completed:
    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def result(self) -> ModelOutput:
        return self._output

    def constrain(self, masks: Masks) -> None:
        pass


class _Direct(CoreClient):
    """Client of a core in this process, without sockets."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def send(self, message: ToCore, data: bytes | None = None) -> None:
        if isinstance(message, EngineRequest):
            self._core.add(message)


class Stopwatch:
    """Sums the time of functions by the part of the loop they belong to."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return a timed version of the function."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return call


async def decode_steps(
    batch: int, num_steps: int = 400, logprobs: int | None = None
) -> dict[str, list[float]]:
    """Return the microseconds of each part for every decode step of `batch` requests.

    The part `core` excludes the scheduler."""
    config = EngineConfig.from_settings({"max_num_seqs": batch})
    executor = RandomTokens(batch)
    core, front = EngineCore(config, executor), AsyncLLM(config=config)
    inputs = InputProcessor(MODEL_DIR, load_tokenizer(MODEL_DIR), executor.info, config.model)
    front.connect_cores([(_Direct(core), executor.info)], inputs)
    params = SamplingParams(max_tokens=900, ignore_eos=True, stop_token_ids=[0], logprobs=logprobs)
    streams = [
        await front.submit(prompt, params)
        for prompt in _prompts([64 + i % 16 for i in range(batch)])
    ]
    watch = Stopwatch()
    scheduler = core.scheduler
    # Methods are replaced by timed versions.
    scheduler.schedule = watch.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = watch.timed("update", scheduler.update)  # type: ignore[method-assign]
    step = watch.timed("core", core.step)
    encode = watch.timed("encode", msgspec.msgpack.Encoder().encode)
    decode = watch.timed("decode", msgspec.msgpack.Decoder(EngineOutputs).decode)
    process = watch.timed("process", front.handle_outputs)
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(WARM_UP + num_steps):
        watch.seconds = dict.fromkeys(PARTS, 0.0)
        process(decode(encode(step()[0])), front.replicas[0])
        watch.seconds["core"] -= watch.seconds["schedule"] + watch.seconds["update"]
        for stream in streams:
            stream.state.next_delta()
        if number >= WARM_UP:
            for part in PARTS:
                spent[part].append(1e6 * watch.seconds[part])
    return spent


def offline(num_requests: int, **params: Any) -> tuple[int, float]:
    """Run `LLM.generate` with 16 to 512 tokens in and out. Returns (output tokens, seconds)."""
    config = EngineConfig.from_settings({"max_num_seqs": num_requests})
    llm = LLM(config=config, executor=RandomTokens(num_requests))
    lengths = np.random.default_rng(1).integers(16, 512, (2, num_requests)).tolist()
    each = [SamplingParams(max_tokens=length, ignore_eos=True, **params) for length in lengths[1]]
    prompts: list[Prompt] = [*_prompts(lengths[0])]
    seconds = []
    for _ in range(REPEATS):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, each, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return sum(lengths[1]), min(seconds)


def _prompts(lengths: list[int]) -> list[list[int]]:
    return [
        [3 + (7 * index + i) % 1000 for i in range(length)] for index, length in enumerate(lengths)
    ]


def main() -> None:
    print(
        f"{'batch':>6}" + "".join(f"{part:>10}" for part in PARTS) + f"{'core side':>12}{'mean':>9}"
    )
    for logprobs in (None, 5):
        if logprobs is not None:
            print(f"with {logprobs} log-probabilities")
        for batch in BATCHES:
            spent = asyncio.run(decode_steps(batch, logprobs=logprobs))
            parts = zip(*(spent[part] for part in CORE_SIDE), strict=True)
            core_side = [sum(times) for times in parts]
            row = "".join(f"{median(spent[part]):10.1f}" for part in PARTS)
            print(f"{batch:6}{row}{median(core_side):12.1f}{fmean(core_side):9.1f}")
    for name, params in (
        ("LLM.generate", {}),
        ("  with a stop string", {"stop": "\x00\x00"}),
        ("  with 5 log-probabilities", {"logprobs": 5}),
    ):
        for num_requests in (16, 256):
            tokens, seconds = offline(num_requests, **params)
            print(
                f"{name}, {num_requests} requests: {tokens / seconds:,.0f} tok/s, "
                f"{1e6 * seconds / tokens:.2f} us per token"
            )


if __name__ == "__main__":
    main()
