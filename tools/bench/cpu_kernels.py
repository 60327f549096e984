"""Time the CPU kernels: `python -m tools.bench.cpu_kernels [--threads N]`.

`python -m tools.bench.kernels` runs the same if there is no GPU. The same run measures, with as
many threads, the bandwidth of reading 512 MiB, and the rate of multiply-adds in registers for each
weight type. A memory-bound kernel is reported as a share of the bandwidth, a compute-bound one as a
share of the rate. Every row is the best of its rounds, over enough tensors to overflow the caches.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from toolkit.kernels import cpu
from toolkit.kernels.cpu import probe
from toolkit.kernels.cpu.attention import AttentionStep, Layer
from toolkit.kernels.cpu.linear import PackedLinear
from toolkit.kernels.cpu.norm import Join
from toolkit.kernels.cpu.sampling import sample
from toolkit.kernels.reference import Norm

COLD_BYTES = 96 << 20
BLOCK_SIZE = 16
ROUNDS = 5
FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


@dataclass(frozen=True, slots=True)
class CPUKernelRow:
    """One line of the table. `calls` use different tensors; the sizes are those of one call."""

    name: str
    calls: Sequence[Callable[[], object]]
    num_bytes: int  # read and written
    flops: int = 0  # 0 if memory-bound
    dtype: torch.dtype = FP32  # of the arithmetic


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time the CPU kernels against this machine's limits."
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    run(parser.parse_args().threads)


def run(threads: int) -> None:
    """Print the table."""
    if not cpu.available():
        sys.exit(f"The CPU kernels are unavailable: {cpu.problem()}")
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    cpu.set_num_threads(threads)
    bandwidth = read_bandwidth()
    rates = {
        dtype: max(probe.multiply(dtype) for _ in range(ROUNDS)) for dtype in (FP32, BF16, INT8)
    }
    limits = ", ".join(f"{_name(dtype)} {rate / 1e9:.0f} G/s" for dtype, rate in rates.items())
    print(
        f"{threads} threads, {cpu.variant()}: reads {bandwidth / 1e9:.1f} GB/s, "
        f"products and sums {limits}"
    )
    for row in rows():
        seconds = best(row.calls)
        if row.flops:
            rate = row.flops / seconds
            share = f"{rate / 1e9:7.1f} G/s     {rate / rates[row.dtype]:6.1%}"
        else:
            rate = row.num_bytes / seconds
            share = f"{rate / 1e9:7.1f} GB/s    {rate / bandwidth:6.1%}"
        print(f"{row.name:52s}{seconds * 1e6:10.1f} us {share}", flush=True)


def best(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of one call, from the best round over all calls."""
    shortest = float("inf")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for call in calls:
            call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest / len(calls)


def read_bandwidth() -> float:
    """Return the bytes read from memory per second."""
    x = torch.ones(512 << 18)
    return x.nbytes / best([lambda: probe.read(x)])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows() -> Iterator[CPUKernelRow]:
    yield from products()
    yield from attentions()
    yield from norms()
    yield from samples()


def products() -> Iterator[CPUKernelRow]:
    """Time products with weights of gpt2's larger layers."""
    for name, out, depth in (("up", 3072, 768), ("head", 50_257, 768)):
        for dtype in (FP32, BF16, INT8):
            weight = torch.randn(out, depth)
            scale = None
            if dtype == INT8:
                weight, scale = (weight * 30).clamp(-127, 127), torch.rand(out)
            packed = [PackedLinear(weight.to(dtype), scale=scale)]
            packed += [
                PackedLinear(weight.to(dtype), scale=scale)
                for _ in range(min(16, COLD_BYTES // packed[0].nbytes))
            ]
            for num_rows in (1, 16, 512) if name == "up" else (1, 16):
                x = torch.randn(num_rows, depth).to(BF16 if dtype == BF16 else FP32)
                flops = 2 * num_rows * out * depth if num_rows > 64 else 0
                calls = [partial(layer, x) for layer in packed[: 2 if flops else None]]
                label = f"product  gpt2 {name}, {num_rows} rows, {_name(dtype)}"
                yield CPUKernelRow(label, calls, packed[0].nbytes, flops, dtype)


def attentions() -> Iterator[CPUKernelRow]:
    gpt2, qwen = (12, 12, 64), (16, 8, 128)
    for name, lens, heads in (
        ("gpt2, 1 x 1000", [(1, 1000)], gpt2),
        ("gpt2, 16 x 200", [(1, 200)] * 16, gpt2),
        ("gpt2, 64 x 300", [(1, 300)] * 64, gpt2),
        ("Qwen3-0.6B, 16 x 500", [(1, 500)] * 16, qwen),
        ("gpt2, prompts 4 x 512", [(512, 512)] * 4, gpt2),
        ("Qwen3-0.6B, 256 after 768", [(256, 1024)], qwen),
    ):
        for dtype in (FP32, BF16):
            yield attention(f"attend   {name}, {_name(dtype)}", lens, heads, dtype)


def attention(
    name: str, lens: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> CPUKernelRow:
    num_heads, num_kv_heads, size = heads
    blocks = [-(-context // BLOCK_SIZE) for _, context in lens]
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
    unused = torch.randperm(sum(blocks)).int()
    for row, count in zip(table, blocks, strict=True):
        row[:count], unused = unused[:count], unused[count:]
    starts = torch.tensor([0] + [queries for queries, _ in lens]).cumsum(0).int()
    count = int(starts[-1])
    no_slots = torch.full((count,), -1)
    contexts = torch.tensor([context for _, context in lens]).int()
    step = AttentionStep(no_slots, starts, contexts, torch.arange(len(lens)).int(), table)
    q = torch.randn(count, num_heads, size).to(dtype)
    num_bytes = sum(context for _, context in lens) * 2 * num_kv_heads * size * dtype.itemsize
    shape = (2, sum(blocks), BLOCK_SIZE, num_kv_heads, size)
    caches = [torch.randn(shape).to(dtype) for _ in range(1 + min(24, COLD_BYTES // num_bytes))]
    layers = [Layer(keys, values, num_heads, scale=size**-0.5) for keys, values in caches]
    calls = [partial(layer.attend, q, step) for layer in layers]
    pairs = sum(n * (context - n) + n * (n + 1) // 2 for n, context in lens)
    return CPUKernelRow(
        name, [*calls], num_bytes, 0 if count == len(lens) else 4 * pairs * num_heads * size
    )


def norms() -> Iterator[CPUKernelRow]:
    for num_rows in (1, 16, 2048):
        (x, residual), (weight, bias) = torch.randn(2, num_rows, 768), torch.randn(2, 768)
        yield CPUKernelRow(
            f"norm     gpt2 with residual sum, {num_rows} rows",
            [partial(Join(768, [Norm(weight, bias, 1e-5, True)]), x, residual)],
            x.nbytes * 4,
        )


def samples() -> Iterator[CPUKernelRow]:
    vocab = 50_257
    for name, parameters, top_k in (
        ("greedy", [0.0, 1.0, 0.0], 0),
        ("random", [0.8, 1.0, 0.0], 0),
        ("random, top-k 40, top-p 0.9", [0.8, 0.9, 0.0], 40),
    ):
        for n in (1, 16):
            logits = torch.randn(n, vocab)
            floats = torch.tensor([[*parameters, 1.0, 0.0, 0.0]] * n)
            ints = torch.tensor([[top_k, seed, 0] for seed in range(n)])
            index = torch.arange(n, dtype=torch.int32)
            call = partial(sample, logits, index, index, floats, ints)
            yield CPUKernelRow(f"sample   {n} x {vocab}, {name}", [call], logits.nbytes)


if __name__ == "__main__":
    main()
