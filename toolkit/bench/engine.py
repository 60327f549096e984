"""`tk bench offline`, `throughput`, `latency` and `prefill`: the engine in this process, no HTTP.

Each command starts one engine. Each workload, or the first requests of it, runs once to warm up;
then all of it runs `repeats` times. A row reports the fastest run and lists the times of all."""

import gc
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from toolkit.bench import workloads
from toolkit.bench.report.files import check_writable
from toolkit.bench.workloads import Workload
from toolkit.config import EngineConfig
from toolkit.config.bench import (
    EngineBenchConfig,
    LatencyConfig,
    OfflineConfig,
    PrefillConfig,
    ThroughputConfig,
)
from toolkit.engine.llm import LLM
from toolkit.errors import ConfigError
from toolkit.sampling.params import SamplingParams

Row = dict[str, Any]


class Run(NamedTuple):
    """A run of a workload. Times in seconds from the submission of its requests."""

    seconds: float
    output_tokens: int
    request_seconds: list[float]  # until each request ended
    preemptions: int


def run_offline(engine: EngineConfig, config: OfflineConfig) -> None:
    """Measure output and total tokens per second of many requests of mixed lengths."""

    def build_workloads(context: int, vocab_size: int) -> list[Workload]:
        return [
            workloads.offline(
                context,
                vocab_size,
                count=config.num_prompts,
                shortest=config.min_len,
                longest=config.max_len,
            )
        ]

    _run(engine, config, build_workloads)


def run_throughput(engine: EngineConfig, config: ThroughputConfig) -> None:
    """Measure tokens and requests per second of many requests of one length."""
    wave = engine.scheduler.max_num_seqs * engine.parallel.data_parallel_size

    def build_workloads(context: int, vocab_size: int) -> list[Workload]:
        return [
            workloads.throughput(
                context,
                vocab_size,
                count=config.num_requests or 3 * wave,
                wave=wave,
                input_len=config.input_len,
                output_len=config.output_len,
            )
        ]

    _run(engine, config, build_workloads)


def run_latency(engine: EngineConfig, config: LatencyConfig) -> None:
    """Measure tokens per second and milliseconds per token at each batch size."""

    def build_workloads(context: int, vocab_size: int) -> list[Workload]:
        lengths = {"input_len": config.input_len, "output_len": config.output_len}
        return [workloads.latency(size, vocab_size, **lengths) for size in config.sizes]

    _run(engine, config, build_workloads)


def run_prefill(engine: EngineConfig, config: PrefillConfig) -> None:
    """Measure prompt tokens per second."""

    def build_workloads(context: int, vocab_size: int) -> list[Workload]:
        return [
            workloads.prefill(
                context, vocab_size, count=config.num_prompts, input_len=config.input_len
            )
        ]

    _run(engine, config, build_workloads)


def _run(
    engine: EngineConfig,
    config: EngineBenchConfig,
    build_workloads: Callable[[int, int], list[Workload]],
) -> None:
    """Start the engine, measure each workload and print its row at once."""
    print_row = _print_json if config.json else _print_line
    bench = EngineBench(engine, config)
    try:
        print_row(bench.startup_row())
        loads = build_workloads(bench.llm.info.max_model_len, bench.llm.info.vocab_size)
        for workload in loads:
            bench.check(workload)
        for workload in loads:
            print_row(bench.measure(workload))
        if config.profile is not None:
            print_row(bench.profile(loads[-1], Path(config.profile)))
    finally:
        bench.llm.shutdown()


class EngineBench:
    """A running engine and the rows measured with it."""

    def __init__(self, engine: EngineConfig, config: EngineBenchConfig) -> None:
        """Start the engine. Raises ToolkitError if it cannot start as configured."""
        self.config = config
        self.phases = {"imports": time.time() - psutil.Process().create_time()}
        start = time.perf_counter()
        llm_class: type[LLM] = LLM
        if config.profile is not None:
            from toolkit.bench.profile import ProfiledLLM

            check_writable(Path(config.profile), "profile")  # before the measurement
            llm_class = ProfiledLLM
        self.llm = llm_class(config=engine, report=self._report)
        self.startup = self.phases["imports"] + time.perf_counter() - start
        if config.profile is not None and self.llm.info.device == "cpu":
            raise ConfigError(
                f"--profile needs a GPU; this engine runs on {self.llm.info.device}.",
                param="profile",
            )
        self._setup = self._describe(engine)

    def _report(self, name: str, seconds: float) -> None:
        self.phases[name] = seconds

    def _describe(self, engine: EngineConfig) -> Row:
        """Return the columns common to all rows."""
        import torch

        from toolkit.version import __version__

        info = self.llm.info
        return {
            "model": engine.model.model or "tk-demo",
            "dtype": info.dtype,
            "device": torch.cuda.get_device_name() if info.device != "cpu" else "cpu",
            "attention_backend": info.attention_backend,
            "max_num_seqs": engine.scheduler.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "prefix_caching": engine.cache.enable_prefix_caching,
            "temperature": self.config.temperature,
            "tk": __version__,
            "torch": torch.__version__,
        }

    def startup_row(self) -> Row:
        """Return the seconds from the process's start to a ready engine, and their parts."""
        phases = {name: round(seconds, 3) for name, seconds in self.phases.items()}
        return {
            "bench": "startup",
            **self._setup,
            "seconds": round(self.startup, 3),
            "phases_s": phases,
        }

    def check(self, work: Workload) -> None:
        """Raise ConfigError if a sequence does not fit into the context."""
        if self.llm.info.hearing is not None:
            raise ConfigError(
                f"The {work.name} benchmark has prompts of text, and this model transcribes sound. "
                "Load a server: tk bench --endpoint transcriptions."
            )
        if work.longest > self.llm.info.max_model_len:
            raise ConfigError(
                f"The {work.name} benchmark has sequences of {work.longest} tokens, but the "
                f"model's context is {self.llm.info.max_model_len}. Choose shorter ones: "
                f"tk bench {work.name} --help."
            )

    def measure(self, work: Workload) -> Row:
        """Run the workload's warm-up, then all of it `repeats` times, and return its row."""
        self._time(work.warm_up)
        runs = [self._time(work) for _ in range(self.config.repeats)]
        seconds, output_tokens, request_seconds, preemptions = min(runs)
        row = {
            "bench": work.name,
            **self._setup,
            "requests": len(work.prompts),
            "prompt_tokens": work.num_prompt_tokens,
            "output_tokens": output_tokens,
            "seconds": round(seconds, 4),
            "all_seconds": [round(run.seconds, 4) for run in runs],
            "output_tokens_per_s": round(output_tokens / seconds, 1),
            "total_tokens_per_s": round((work.num_prompt_tokens + output_tokens) / seconds, 1),
        }
        if work.name in ("offline", "throughput"):
            row["preemptions"] = preemptions
        if work.name == "throughput":
            row["requests_per_s"] = round(len(work.prompts) / seconds, 2)
            row["mean_request_s"] = round(float(np.mean(request_seconds)), 4)
            row["p99_request_s"] = round(float(np.percentile(request_seconds, 99)), 4)
        if work.name == "latency":
            row["ms_per_token"] = round(seconds / max(work.output_lens) * 1e3, 4)
        if work.name == "prefill":
            row["prompt_tokens_per_s"] = round(work.num_prompt_tokens / seconds, 1)
        return row

    def profile(self, work: Workload, path: Path) -> Row:
        """Run the workload again under the profiler, write a trace and return a row about it."""
        from toolkit.bench.profile import ProfiledLLM, profile_window

        assert isinstance(self.llm, ProfiledLLM)
        seconds = self._time(work).seconds
        row = profile_window(self.llm, lambda: self._time(work), seconds, path)
        return {"bench": "profile", **self._setup, "work": work.name, **row}

    def _time(self, work: Workload) -> Run:
        params = [
            SamplingParams(temperature=self.config.temperature, max_tokens=n, ignore_eos=True)
            for n in work.output_lens
        ]
        gc.collect()
        start = time.monotonic()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in work.prompts], params, use_tqdm=False
        )
        return Run(
            time.monotonic() - start,
            sum(len(one.outputs[0].token_ids) for one in outputs),
            [one.finished_at - start for one in outputs],
            sum(one.outputs[0].num_preemptions for one in outputs),
        )


def _print_json(row: Row) -> None:
    print(json.dumps(row), flush=True)


def _print_line(row: Row) -> None:
    print(_LINES.get(row["bench"], _work_line)(row), flush=True)


def _startup_line(row: Row) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["phases_s"].items())
    return (
        f"{row['model']}  {row['dtype']}  {row['device']}  {row['attention_backend']} attention  "
        f"tk {row['tk']}  torch {row['torch']}\n"
        f"{'start-up':<10} {row['seconds']:9.3f} s   ({phases})"
    )


def _work_line(row: Row) -> str:
    parts = [f"{row['bench']:<10} {row['seconds']:9.3f} s   {row['requests']:>4} requests"]
    if row["bench"] == "prefill":
        parts.append(f"{row['prompt_tokens_per_s']:>11,.0f} prompt tok/s")
    else:
        parts.append(f"{row['output_tokens_per_s']:>11,.0f} output tok/s")
    if row["bench"] == "latency":
        parts.append(f"{row['ms_per_token']:.3f} ms/token")
    else:
        parts.append(f"{row['total_tokens_per_s']:,.0f} total tok/s")
    if row["bench"] == "throughput":
        parts.append(f"{row['requests_per_s']:,.2f} requests/s")
        parts.append(f"request {row['mean_request_s']:.3f} s mean, {row['p99_request_s']:.3f} p99")
    if row.get("preemptions"):  # memory was short, and requests began again
        parts.append(f"{row['preemptions']:,} preemptions")
    return "   ".join([*parts, f"(runs: {_join(row['all_seconds'])} s)"])


def _profile_line(row: Row) -> str:
    kernels = "".join(
        f"\n  {one['share']:6.1%}  {one['count']:6d} x {one['mean_us']:8.1f} us  {one['name'][:90]}"
        for one in row["kernels"]
    )
    return (
        f"{'profile':<10} GPU busy {row['gpu_busy']:.1%} of {row['window_s'] * 1e3:.0f} ms "
        f"({row['steps']} steps); trace in {row['trace']}{kernels}"
    )


def _join(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


_LINES: dict[str, Callable[[Row], str]] = {"startup": _startup_line, "profile": _profile_line}
