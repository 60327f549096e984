"""Times and kernels of single steps: `python -m tools.bench.steps FOLDER --requests 256,512`.

For each number of requests, prompts of `--context` tokens are queued together. Two kinds of steps
are measured: mixed steps of --max-num-batched-tokens tokens, from when half of the requests decode
(if their prompts last long enough), and decode steps of all requests. Each has the time of a step,
the host's part of it (all but waiting for the device), and a floor: the weights and the keys and
values of its requests, read at the memory bandwidth. On a GPU more steps are profiled, and a table
lists their kernels. On a CPU the host computes. Weights are random, and prefix caching is off."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from toolkit.bench.profile import start_profiler, summarize
from toolkit.bench.workloads import throughput
from toolkit.config import EngineConfig
from toolkit.engine.llm import LLM
from toolkit.engine.messages import EngineOutputs
from toolkit.executor import Executor, Pending, start_executor
from toolkit.models.build import load_config
from toolkit.models.config.registry import describe
from toolkit.models.describe import Decoder
from toolkit.sampling.grammar import Masks
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.scheduler.stats import EngineStats
from toolkit.worker.operations import Operation

SKIPPED = 2
"""First steps of a kind, which were launched while the host did other work."""


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers of consecutive steps that are measured."""

    timed: int
    profiled: int

    @property
    def length(self) -> int:
        return SKIPPED + self.timed + self.profiled


MIXED, DECODE = Span(timed=6, profiled=4), Span(timed=40, profiled=10)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means of the timed steps of one kind. Times in seconds."""

    name: str
    tokens: float
    sampled: float  # tokens that the step samples
    seconds: float
    host_seconds: float
    operations: float
    bytes_read: float
    profiled: int = 0  # steps of the profile
    profile: dict[str, Any] | None = None  # as `toolkit.bench.profile.summarize` returns it


def main() -> None:
    parser = argparse.ArgumentParser(description="Times and kernels of single steps.")
    parser.add_argument("folder", type=Path, help="model folder; weights are not read")
    parser.add_argument("--requests", default="256,512,1024,2048", metavar="N,...")
    parser.add_argument("--context", type=int, default=1000, metavar="TOKENS")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--fp8", action="store_true", help="8-bit weights and KV cache (GPU)")
    parser.add_argument(
        "--bandwidth", type=float, default=4.8, metavar="TB/S", help="of the floor; default: 4.8"
    )
    args = parser.parse_args()
    requests = [int(number) for number in args.requests.split(",")]
    if max(requests) >= args.max_num_batched_tokens:
        parser.error("--max-num-batched-tokens must be above the number of requests.")
    settings = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if args.fp8 else {}
    for number, kinds in measure(
        args.folder, requests, args.context, args.max_num_batched_tokens, **settings
    ):
        print(f"\n{number} requests with prompts of {args.context} tokens")
        for times in kinds:
            print(table(times, args.bandwidth * 1e12))
        if not kinds:
            print("The KV cache is too small for them. Give a shorter --context.")


def measure(
    folder: Path, requests: list[int], context: int, max_num_batched_tokens: int, **settings: Any
) -> Iterator[tuple[int, list[StepTimes]]]:
    """Yield each number of requests with its mixed steps, if there were enough, and decode steps.

    Requests that do not fit into the KV cache together are not run, and have neither.
    `settings`: more settings of the engine."""
    answers = {
        number: _num_steps_of_prompts(number, context, max_num_batched_tokens) + DECODE.length + 2
        for number in requests
    }
    config = EngineConfig.from_settings(
        {
            "model": str(folder),
            "load_format": "dummy",
            "max_num_seqs": max(requests),
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": context + max(answers.values()),
            "enable_prefix_caching": False,
        }
        | settings
    )
    executor = WaitTimer(start_executor(config, folder, lambda name, seconds: None))
    llm = WatchedLLM(config=config, executor=executor)
    try:
        if llm.info.device != "cpu":
            start_profiler()
        for number, answer in answers.items():
            fits = number * (context + answer) <= llm.info.cache_tokens
            yield number, _measure(llm, executor, number, context, answer) if fits else []
    finally:
        llm.shutdown()


def table(times: StepTimes, bandwidth: float) -> str:
    """Return the lines about one kind of steps. `bandwidth`: bytes per second."""
    floor = times.bytes_read / bandwidth
    lines = [
        f"{times.name}: {times.tokens:,.0f} tokens, {times.sampled:,.0f} sampled; "
        f"{times.seconds * 1e3:.3f} ms a step, host {times.host_seconds * 1e3:.3f} ms; "
        f"floor {floor * 1e3:.3f} ms ({floor / times.seconds:.0%}; "
        f"{times.bytes_read / 1e9:.2f} GB); {times.operations / times.seconds / 1e12:.1f} TFLOP/s"
    ]
    if times.profile is not None:
        steps, found = times.profiled, times.profile
        length = found["window_s"] / steps * 1e3
        lines.append(f"profile: {length:.3f} ms a step, GPU busy {found['gpu_busy']:.1%} of it")
        lines.append("   share   us/step   calls/step  mean us  kernel")
        lines += [
            f"  {one['share']:6.1%}  {one['count'] * one['mean_us'] / steps:8.1f}  "
            f"{one['count'] / steps:10.1f}  {one['mean_us']:8.1f}  {one['name'][:90]}"
            for one in found["kernels"]
        ]
    return "\n".join(lines)


class WaitTimer(Executor):
    """Runs steps on another executor, and adds up the seconds for which the host waits for them."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self.info = executor, executor.info
        self.seconds = 0.0

    def execute(self, step: SchedulerOutput) -> Pending:
        return _TimedPending(self._executor.execute(step), self)

    def operate(self, operation: Operation) -> Future[None]:
        return self._executor.operate(operation)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return self._executor.collective(method, *args)

    def check_health(self) -> None:
        self._executor.check_health()

    def shutdown(self) -> None:
        self._executor.shutdown()


class _TimedPending:
    def __init__(self, pending: Pending, timer: WaitTimer) -> None:
        self._pending, self._timer = pending, timer

    def result(self) -> ModelOutput:
        begin = time.perf_counter()
        try:
            return self._pending.result()
        finally:
            self._timer.seconds += time.perf_counter() - begin

    def constrain(self, masks: Masks) -> None:
        self._pending.constrain(masks)


class WatchedLLM(LLM):
    """An LLM that passes the statistics of each step to `watches`."""

    watches: tuple[StepWatch, ...] = ()

    def _step(self, on_step: Callable[[EngineOutputs], None] | None) -> bool:
        return super()._step(self._watch)

    def _watch(self, message: EngineOutputs) -> None:
        for watch in self.watches:
            assert message.stats is not None
            watch.add(message.stats)


class StepWatch:
    """Times the first consecutive steps of a kind, then profiles those that follow."""

    def __init__(
        self, name: str, span: Span, timer: WaitTimer, matches: Callable[[EngineStats], bool]
    ) -> None:
        self._name, self._span, self._timer, self._matches = name, span, timer, matches
        on_gpu = timer.info.device != "cpu"
        self._profiler = profile(activities=[ProfilerActivity.CUDA]) if on_gpu else None
        self._steps: list[EngineStats] = []
        self._is_done = False
        self._began = self._ended = self._waited = 0.0

    def add(self, stats: EngineStats) -> None:
        """Add a step that has ended."""
        if self._is_done or not (self._steps or self._matches(stats)):
            return
        if not self._matches(stats):
            self._end()
            return
        self._steps.append(stats)
        match len(self._steps) - SKIPPED:
            case 0:
                self._began, self._waited = time.perf_counter(), -self._timer.seconds
            case self._span.timed:
                self._ended = time.perf_counter()
                self._waited += self._timer.seconds
                if self._profiler is not None:
                    torch.cuda.synchronize()  # the profile has the steps launched from here on
                    self._profiler.start()
        if len(self._steps) == self._span.length:
            self._end()

    def _end(self) -> None:
        self._is_done = True
        if self._profiler is not None and len(self._steps) >= SKIPPED + self._span.timed:
            torch.cuda.synchronize()
            self._profiler.stop()

    def times(self, unread_bytes: int) -> StepTimes | None:
        """Return the means of the timed steps; None if there were too few.

        `unread_bytes`: weights that a step does not read."""
        timed = self._span.timed
        steps = self._steps[SKIPPED:][:timed]
        if len(steps) < timed:
            return None
        seconds = self._ended - self._began
        profiled = len(self._steps) - SKIPPED - timed
        found = None
        if self._profiler is not None and profiled == self._span.profiled:
            with tempfile.TemporaryDirectory() as folder:
                found = summarize(self._profiler, Path(folder) / "trace.json")
        return StepTimes(
            self._name,
            tokens=fmean(one.num_tokens for one in steps),
            sampled=fmean(one.num_sampled for one in steps),
            seconds=seconds / timed,
            host_seconds=(seconds - self._waited) / timed,
            operations=fmean(one.work[0] for one in steps),
            bytes_read=fmean(one.work[1] for one in steps) - unread_bytes,
            profiled=profiled,
            profile=found,
        )


def _measure(
    llm: WatchedLLM, timer: WaitTimer, number: int, context: int, answer: int
) -> list[StepTimes]:
    """Run requests with answers of a length, and return their kinds of steps."""
    budget = llm.info.max_num_batched_tokens
    llm.watches = (
        StepWatch(
            "mixed",
            MIXED,
            timer,
            lambda stats: stats.num_tokens == budget and stats.num_sampled >= number / 2,
        ),
        StepWatch(
            "decode", DECODE, timer, lambda stats: stats.num_tokens == stats.num_sampled == number
        ),
    )
    work = throughput(
        llm.info.max_model_len,
        llm.info.vocab_size,
        count=number,
        wave=number,
        input_len=context,
        output_len=answer,
    )
    params = SamplingParams(temperature=0.6, max_tokens=answer, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], params, use_tqdm=False)
    unread = _embedding_bytes(llm)
    return [times for watch in llm.watches if (times := watch.times(unread)) is not None]


def _num_steps_of_prompts(number: int, context: int, max_num_batched_tokens: int) -> int:
    """Return the most steps until all prompts are computed, while earlier requests decode."""
    return math.ceil(number * context / (max_num_batched_tokens - number)) + 1


def _embedding_bytes(llm: LLM) -> int:
    """Return the bytes of the embeddings, of which a step reads a few rows; 0 if the head's."""
    described = describe(load_config(llm.folder))
    if not isinstance(described, Decoder) or described.is_tied:
        return 0
    dtype: torch.dtype = getattr(torch, llm.info.dtype)
    return described.vocab_size * described.hidden_size * dtype.itemsize


if __name__ == "__main__":
    main()
