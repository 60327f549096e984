"""What `tk serve` takes beside its model: `python -m tools.bench.footprint [--dtype D] [--quantization int8]`.

GPT-2's shape (124M) with random weights. Seconds to the first answer of /readyz; memory of all the server's processes (pages that
several share count once) after twice 16 ragged requests at once, which fill the cache, less weights and cache; and the share of a
core that the server takes while nobody asks it anything.
"""

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

from tools.bench.server_process import serving
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
    more = ["--quantization", args.quantization] if args.quantization else []
    size = (
        "0.25" if args.dtype == "float32" else "0.125"
    )  # GiB: the tokens of one round, and a little more
    with tempfile.TemporaryDirectory() as scratch:
        make_gpt2(Path(scratch))
        make_tokenizer(Path(scratch), 50257)
        arguments = [
            scratch,
            "--device",
            "cpu",
            "--dtype",
            args.dtype,
            "--kv-cache-memory",
            size,
            *more,
        ]
        with serving(arguments) as server:
            device = server.client.get("/server_info").json()["device"]
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
        "beside_mib": round((memory - weights - cache) / MIB),
        "idle_percent_of_a_core": round(100 * share, 2),
    }
    print(json.dumps(row))


def ask(client: httpx.Client, first: int) -> None:
    """All requests of `mixed` at once, each with this token before its prompt."""

    def one(prompt: list[int], length: int) -> None:
        body = {
            "prompt": [first, *prompt],
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
        }
        client.post("/v1/completions", json=body).raise_for_status()

    prompts, lengths = mixed()
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(one, prompts, lengths))


def resident(process: psutil.Process) -> int:
    """Bytes; a page of several processes is shared out among them, where the system tells."""
    found = process.memory_full_info()
    return int(getattr(found, "pss", found.rss))


def idle_share(processes: Sequence[psutil.Process], seconds: float) -> float:
    time.sleep(2)  # what follows an answer is over
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    start = time.monotonic()
    time.sleep(seconds)
    return (sum(sum(process.cpu_times()[:2]) for process in processes) - before) / (
        time.monotonic() - start
    )


if __name__ == "__main__":
    main()
