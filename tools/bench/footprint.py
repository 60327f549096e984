"""Measure what `tk serve` needs in addition to its model: `python -m tools.bench.footprint`.

The model is GPT-2's shape (124M) with random weights. Reports the seconds to the first answer of
/readyz, the memory of all server processes without weights and cache (shared pages count once)
after two rounds of 16 ragged requests that fill the cache, and the CPU use of the idle server."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tools.bench.server_process import run_server
from tools.bench.versus_cpu import make_tokenizer, mixed
from tools.bench.versus_transformers import make_gpt2

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--idle", type=float, default=30.0, metavar="SECONDS")
    args = parser.parse_args()
    quantization = ["--quantization", args.quantization] if args.quantization else []
    size = "0.25" if args.dtype == "float32" else "0.125"  # GiB: slightly more than one round
    with tempfile.TemporaryDirectory() as scratch:
        make_gpt2(Path(scratch))
        make_tokenizer(Path(scratch), 50257)
        arguments = [scratch, "--device", "cpu", "--dtype", args.dtype, "--kv-cache-memory", size]
        arguments += quantization
        with run_server(arguments) as server:
            device = server.client.get("/server_info").json()["models"][0]["device"]
            weights, cache = device["weight_bytes"], device["cache_bytes"]
            for first in (0, 1):
                ask(server.client, first)
            processes = [
                psutil.Process(server.pid),
                *psutil.Process(server.pid).children(recursive=True),
            ]
            memory = sum(resident(process) for process in processes)
            share = idle_share(processes, args.idle)
    row = {
        "ready_s": round(server.ready, 1),
        "memory_mib": round(memory / MIB),
        "weights_mib": round(weights / MIB),
        "cache_mib": round(cache / MIB),
        "overhead_mib": round((memory - weights - cache) / MIB),
        "idle_percent_of_a_core": round(100 * share, 2),
    }
    print(json.dumps(row))


def ask(client: httpx.Client, first: int) -> None:
    """Send all requests of `mixed` at once, each prompt preceded by the token `first`."""

    def send(prompt: list[int], length: int) -> None:
        body = {
            "prompt": [first, *prompt],
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
        }
        client.post("/v1/completions", json=body).raise_for_status()

    prompts, lengths = mixed()
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(send, prompts, lengths))


def resident(process: psutil.Process) -> int:
    """Return the resident bytes, with shared pages split between processes where supported."""
    found = process.memory_full_info()
    return int(getattr(found, "pss", found.rss))


def idle_share(processes: Sequence[psutil.Process], seconds: float) -> float:
    """Return the CPU use of idle processes as a share of a core."""
    time.sleep(2)  # let the work after the last answer finish
    before, start = cpu_seconds(processes), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(processes) - before) / (time.monotonic() - start)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    main()
