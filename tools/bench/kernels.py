"""Time the kernels: `python -m tools.bench.kernels [--tune]`.

Without a GPU, it times the CPU kernels (`tools.bench.cpu_kernels`). Decode is memory-bound and
reported as a share of the bandwidth of a large copy in the same run. Prefill is compute-bound and
reported as a share of a large bf16 matrix product. Kernels are timed as replays of a CUDA graph
whose calls use enough KV caches to overflow the L2 cache, as the layers of a model do. Products of
few rows are timed the same way, each after a norm of its input that it has to wait for. Products of
many rows use the algorithm that an engine would choose."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from toolkit.kernels import cublas
from toolkit.kernels.reference import HeadNorm, Norm
from toolkit.kernels.triton import activation, norm
from toolkit.kernels.triton.attention import attention
from toolkit.kernels.triton.attention.attention import Batch, Logits, Tile
from toolkit.kernels.triton.products import fp8, linear
from toolkit.kernels.triton.sampling import sampling
from tools.bench import cpu_kernels as cpu_bench
from tools.bench.kernel_calls import (
    BLOCK_SIZE,
    COLD_BYTES,
    LLAMA,
    QWEN3,
    KernelRow,
    TensorFactory,
    fp8_products,
    layer_rows,
    logits_rows,
    state_rows,
)

DTYPE = torch.bfloat16
MAX_CACHES = 64
PREFILL_TOKENS = 8192
"""Rows of the products of a prefill step."""


@dataclass(frozen=True)
class AttentionCase:
    """One attention call. `lens`: (queries, context) of every request."""

    name: str
    lens: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_size: int
    cache_dtype: torch.dtype = DTYPE
    sliding_window: int = 0  # tokens visible to a query, itself included; 0: all
    soft_cap: float = 0.0  # bound of the logits; 0: none
    is_decode: bool = False  # several queries are a token and its drafts

    @property
    def logits(self) -> Logits:
        return Logits(self.head_size**-0.5, self.sliding_window, self.soft_cap)

    @property
    def max_query_len(self) -> int:
        return max(queries for queries, _ in self.lens)

    @property
    def max_seq_len(self) -> int:
        return max(context for _, context in self.lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are visible to a query."""
        keys = sum(
            min(context, self._visible(context) + queries - 1) for queries, context in self.lens
        )
        return keys * 2 * self.kv_heads * self.head_size * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        """FLOPs of two products over the visible (query, key) pairs."""
        pairs = sum(
            self._visible(before)
            for queries, context in self.lens
            for before in range(context - queries + 1, context + 1)
        )
        return 4 * pairs * self.heads * self.head_size

    def _visible(self, num_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens up to a query it sees."""
        return min(num_tokens, self.sliding_window or num_tokens)

    def batches(self) -> list[Batch]:
        """Return the same step over different caches, like the layers of a model."""
        num_caches = min(MAX_CACHES, -(-COLD_BYTES // self.kv_bytes))
        blocks = [-(-context // BLOCK_SIZE) for _, context in self.lens]
        table = torch.zeros(len(self.lens), max(blocks), dtype=torch.int32)
        unused = torch.randperm(sum(blocks))
        for row, count in zip(table, blocks, strict=True):
            row[:count], unused = unused[:count], unused[count:]
        counts = torch.tensor([0] + [queries for queries, _ in self.lens])
        shape = (sum(blocks), BLOCK_SIZE, self.kv_heads, self.head_size)
        q = torch.randn(int(counts.sum()), self.heads, self.head_size, device="cuda", dtype=DTYPE)
        query_start_loc = counts.cumsum(0).int().cuda()
        seq_lens = torch.tensor([context for _, context in self.lens], dtype=torch.int32).cuda()
        return [
            Batch(
                q,
                torch.randn(shape, device="cuda", dtype=DTYPE).to(self.cache_dtype),
                torch.randn(shape, device="cuda", dtype=DTYPE).to(self.cache_dtype),
                query_start_loc,
                seq_lens,
                table.cuda(),
                torch.empty_like(q),
            )
            for _ in range(num_caches)
        ]


DECODE = [
    AttentionCase("Qwen3-0.6B, 256 x 800", ((1, 800),) * 256, 16, 8, 128),
    AttentionCase("gpt2, 256 x 300", ((1, 300),) * 256, 12, 12, 64),
    AttentionCase("Llama-3.1-8B, 64 x 4096", ((1, 4096),) * 64, 32, 8, 128),
    AttentionCase(
        "Qwen3-0.6B, 256 x 100..1024",
        tuple((1, 100 + 925 * i // 256) for i in range(256)),
        16,
        8,
        128,
    ),
    AttentionCase("Llama-3.1-8B, 8 x 1024", ((1, 1024),) * 8, 32, 8, 128),
    AttentionCase("Llama-3.1-8B, 1 x 1024", ((1, 1024),), 32, 8, 128),
    AttentionCase("gpt2, 1 x 256", ((1, 256),), 12, 12, 64),
    AttentionCase("Qwen3-0.6B, 256 x 800, FP8 cache", ((1, 800),) * 256, 16, 8, 128, fp8.FP8),
    AttentionCase(
        "Mistral-7B, 16 x 8192, window 4096", ((1, 8192),) * 16, 32, 8, 128, sliding_window=4096
    ),
    AttentionCase("Gemma-2-9B, 16 x 4096, soft cap", ((1, 4096),) * 16, 16, 8, 256, soft_cap=50.0),
]
VERIFY = [
    AttentionCase(
        f"Llama-3.1-8B, {num_reqs} x {queries} at {context}",
        ((queries, context),) * num_reqs,
        32,
        8,
        128,
        is_decode=True,
    )
    for queries in (4, 8)
    for context in (1024, 8192)
    for num_reqs in (1, 8, 64)
]
PREFILL = [
    AttentionCase("Llama-3.1-8B, 8 x 1024", ((1024, 1024),) * 8, 32, 8, 128),
    AttentionCase("Qwen3-0.6B, 4 x 2048", ((2048, 2048),) * 4, 16, 8, 128),
    AttentionCase("gpt2, 16 x 1000", ((1000, 1000),) * 16, 12, 12, 64),
    AttentionCase("Llama-3.1-8B, 512 after 3584", ((512, 4096),), 32, 8, 128),
    AttentionCase("Llama-3.1-8B, 1 x 128", ((128, 128),), 32, 8, 128),
    AttentionCase(
        "Mistral-7B, 2 x 8192, window 4096", ((8192, 8192),) * 2, 32, 8, 128, sliding_window=4096
    ),
    AttentionCase("Gemma-2-9B, 2 x 4096, soft cap", ((4096, 4096),) * 2, 16, 8, 256, soft_cap=50.0),
]
DECODE_TILES = [  # keys, warps, stages; queries and group determine the rows
    (32, 2, 3),
    (32, 2, 4),
    (32, 4, 3),
    (32, 4, 4),
    (32, 8, 3),
    (64, 2, 3),
    (64, 2, 4),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (64, 4, 5),
    (64, 8, 3),
    (128, 4, 3),
    (128, 4, 4),
]
PREFILL_TILES = [
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 32, 4, 3),
    Tile(128, 32, 4, 3),
    Tile(128, 32, 4, 4),
    Tile(128, 64, 4, 2),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 4),
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(256, 64, 8, 3),
]
MIXED = [
    AttentionCase(
        "Qwen3-0.6B, 255 x 1 at 800 and 512 at 1024", ((1, 800),) * 255 + ((512, 1024),), 16, 8, 128
    )
]

SAMPLES: list[tuple[str, int, int, tuple[float, int, float, float]]] = [
    # rows, vocabulary, (temperature, top-k, top-p, min-p)
    ("Qwen3, 256 plain", 256, 151_936, (0.6, 0, 1.0, 0.0)),
    ("Qwen3, 64 plain", 64, 151_936, (0.6, 0, 1.0, 0.0)),
    ("Qwen3, 1 plain", 1, 151_936, (0.6, 0, 1.0, 0.0)),
    ("Qwen3, 64 top-k 20, top-p 0.95", 64, 151_936, (0.6, 20, 0.95, 0.0)),
    ("Qwen3, 64 top-p 0.95", 64, 151_936, (0.6, 0, 0.95, 0.0)),
    ("Qwen3, 64 min-p 0.05", 64, 151_936, (0.6, 0, 1.0, 0.05)),
    ("gpt2, 256 plain", 256, 50_257, (0.6, 0, 1.0, 0.0)),
]

PRODUCTS = [  # rows of the weight, columns, gated
    ("Llama-3.1-8B, qkv", 6144, 4096, False),
    ("Llama-3.1-8B, out", 4096, 4096, False),
    ("Llama-3.1-8B, gate and up", 28672, 4096, True),
    ("Llama-3.1-8B, down", 4096, 14336, False),
    ("Llama-3.1-8B, head", 128_256, 4096, False),
    ("Qwen3-0.6B, qkv", 4096, 1024, False),
    ("Qwen3-0.6B, out", 1024, 2048, False),
    ("Qwen3-0.6B, gate and up", 6144, 1024, True),
    ("Qwen3-0.6B, down", 1024, 3072, False),
    ("gpt2, qkv", 2304, 768, False),
    ("gpt2, out", 768, 768, False),
    ("gpt2, up", 3072, 768, False),
    ("gpt2, down", 768, 3072, False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the kernels on this machine.")
    parser.add_argument(
        "--tune", action="store_true", help="try many tile shapes and print the four best of each"
    )
    tune = parser.parse_args().tune
    if not torch.cuda.is_available():
        cpu_bench.run(os.cpu_count() or 1)
        return
    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, "
        f"bf16 {rate / 1e12:.0f} TFLOP/s"
    )
    kinds = {"decode": DECODE, "verify": VERIFY, "prefill": PREFILL, "mixed": MIXED}
    for kind, cases in kinds.items():
        for case in cases:
            batches = case.batches()
            for label, seconds in attention_times(case, batches, tune):
                if kind == "prefill":
                    share = achieved(case.flops / seconds, rate, "TFLOP/s")
                else:
                    share = achieved(case.kv_bytes / seconds, bandwidth, "TB/s")
                print(
                    f"{kind:8s}{case.name:44s}{seconds * 1e6:8.1f} us {share}  {label}", flush=True
                )
            del batches
    for name, n, vocab, parameters in SAMPLES:
        seconds, num_bytes = sample_time(n, vocab, *parameters)
        share = achieved(num_bytes / seconds, bandwidth, "TB/s")
        print(f"{'sample':8s}{name:44s}{seconds * 1e6:8.1f} us {share}")
    make = TensorFactory(torch.device("cuda"), DTYPE)
    for num_tokens in (1, 64, 8192):
        for row in layer_rows(num_tokens, make):
            print_row("layer", row, f"{num_tokens} tokens", bandwidth)
    for n in (1, 64):
        for row in logits_rows(n, 151_936, 1024, make):
            print_row("logits", row, f"{n} rows", bandwidth)
    for num_reqs, each in ((256, 1), (8, 1024)):
        for row in state_rows(num_reqs, each, 512, make):
            print_row("state", row, f"{num_reqs} x {each}", bandwidth)
    for num_tokens in (1, 8, 64):
        for name, rows, columns, gated in PRODUCTS:
            if num_tokens > linear.FEW_TOKENS and rows > linear.MAX_ROWS:
                continue
            seconds, by_library = (
                seconds_of(calls) for calls in product_calls(num_tokens, rows, columns, gated)
            )
            share = achieved(rows * columns * DTYPE.itemsize / seconds, bandwidth, "TB/s")
            label = f"cuBLAS {by_library * 1e6:.1f} us"
            size = f"{name}, {num_tokens} tokens"
            print(f"{'product':8s}{size:44s}{seconds * 1e6:8.1f} us {share}  {label}")
            # The head is not quantized.
            if num_tokens <= fp8.TOKENS and not name.endswith("head"):
                calls = fp8_products(num_tokens, rows, columns, gated, make)
                row = KernelRow(f"{name}, FP8", calls, rows * (columns + 4))
                print_row("product", row, f"{num_tokens} tokens", bandwidth)
    for num_tokens in (2, 8, 16, 64):
        for name, (hidden, inner, heads, _, head_size) in (("Llama", LLAMA), ("Qwen3", QWEN3)):
            fused, separate = (
                seconds_of(calls)
                for calls in norm_calls(num_tokens, hidden, heads * head_size, inner)
            )
            num_bytes = hidden * (heads * head_size + 2 * inner) * DTYPE.itemsize
            share = achieved(num_bytes / fused, bandwidth, "TB/s")
            size = f"{name} out, norm, gate-up, {num_tokens} tokens"
            label = f"separate norm kernel {separate * 1e6:.1f} us"
            print(f"{'norm':8s}{size:44s}{fused * 1e6:8.1f} us {share}  {label}")
    for name, rows, columns, _ in PRODUCTS:
        if name.startswith("gpt2") or name.endswith("head"):
            continue  # a bias excludes a choice; the head has one row per prompt
        chosen, by_pytorch = long_product_times(rows, columns)
        share = achieved(2 * PREFILL_TOKENS * rows * columns / chosen, rate, "TFLOP/s")
        label = f"PyTorch's choice {by_pytorch * 1e6:.1f} us"
        size = f"{name}, {PREFILL_TOKENS} tokens"
        print(f"{'product':8s}{size:44s}{chosen * 1e6:8.1f} us {share}  {label}")


def print_row(kind: str, row: KernelRow, size: str, bandwidth: float) -> None:
    seconds = seconds_of(row.calls)
    share = achieved(row.num_bytes / seconds, bandwidth, "TB/s")
    print(f"{kind:8s}{f'{row.name}, {size}':44s}{seconds * 1e6:8.1f} us {share}", flush=True)


def achieved(rate: float, ceiling: float, unit: str) -> str:
    return f"{rate / 1e12:7.2f} {unit:8s}{rate / ceiling:6.1%}"


def attention_times(
    case: AttentionCase, batches: list[Batch], tune: bool
) -> list[tuple[str, float]]:
    """Time the default call, others that compute the same and, if tuning, the best tiles."""

    def attend(batch: Batch, is_decode: bool = case.is_decode) -> None:
        attention.paged_attention(
            *batch[:6],
            max_query_len=case.max_query_len,
            max_seq_len=case.max_seq_len,
            **case.logits._asdict(),
            out=batch.out,
            is_decode=is_decode,
        )

    rows = [("", seconds_per_call(attend, batches))]
    if case.is_decode:
        as_prompts = partial(attend, is_decode=False)
        rows.append(("by the kernel of prompts", seconds_per_call(as_prompts, batches)))
    if case.max_query_len == 1:
        rows.append(
            (
                "with head norms, rotation and cache",
                seconds_per_call(fused_decode(case, batches[0]), batches),
            )
        )
    if tune:
        rows += sorted(variants(case, batches), key=lambda row: row[1])[:4]
    return rows


def fused_decode(case: AttentionCase, first: Batch) -> Callable[[Batch], None]:
    """Return a decode step from the projections on. `first`: any batch; all share their tables."""
    width = (case.heads + 2 * case.kv_heads) * case.head_size
    qkv = torch.randn(len(case.lens), width, device="cuda", dtype=DTYPE)
    weight = torch.ones(1, case.head_size, device="cuda", dtype=DTYPE)
    cos_sin = torch.randn(len(case.lens), 2, case.head_size // 2, device="cuda", dtype=DTYPE)
    last = torch.tensor([context - 1 for _, context in case.lens], device="cuda")
    requests = torch.arange(len(case.lens), device="cuda")
    slots = first.block_table[requests, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE

    def run(batch: Batch) -> None:
        attention.decode_attention(
            qkv,
            batch.k_cache,
            batch.v_cache,
            slots,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            num_heads=case.heads,
            max_seq_len=case.max_seq_len,
            **case.logits._asdict(),
            cos_sin=cos_sin,
            norm=HeadNorm(weight, weight, 1e-6),
        )

    return run


def variants(case: AttentionCase, batches: list[Batch]) -> Iterator[tuple[str, float]]:
    """Time all candidate tiles except those that do not fit the GPU."""
    calls: dict[str, Callable[[Batch], None]] = {}
    queries = case.max_query_len
    if queries == 1 or case.is_decode:
        rows = max(16, queries * batches[0].group)
        max_splits = 1 if len(case.lens) >= 256 else 32
        for keys, warps, stages in DECODE_TILES:
            tile = Tile(rows, keys, warps, stages)
            splits = 1
            while splits <= min(max_splits, case.max_seq_len // keys):
                calls[f"{tile} splits={splits}"] = partial(
                    attention.decode,
                    logits=case.logits,
                    splits=splits,
                    tile=tile,
                    queries=queries,
                )
                splits *= 2
    else:
        for tile in PREFILL_TILES:
            calls[str(tile)] = partial(
                attention.prefill, logits=case.logits, singles=True, tile=tile
            )
    for label, call in calls.items():
        try:
            yield label, seconds_per_call(call, batches)
        except OutOfResources:
            print(f"{label} does not fit", file=sys.stderr)


def seconds_per_call(
    call: Callable[[Batch], None], batches: list[Batch], replays: int = 10
) -> float:
    """Return the seconds of a call, from a graph with one call per batch."""
    call(batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            call(batch)
    return elapsed(graph.replay, replays) / len(batches)


def elapsed(run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one `run` by the GPU's clock: the best of five means."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    best = float("inf")
    run()
    for _ in range(5):
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / repeats * 1e-3)
    return best


def copy_bandwidth() -> float:
    """Return the bytes read and written per second by a copy of 4 GiB."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / elapsed(lambda: target.copy_(source), 5)


def matmul_rate() -> float:
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=DTYPE)
    return 2 * 8192**3 / elapsed(lambda: a @ b, 5)


def sample_time(
    n: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, int]:
    """Return (seconds to sample a token for each of n rows of bf16 logits, bytes of the logits)."""
    num_bytes = n * vocab * DTYPE.itemsize
    padded = -(-vocab // 64) * 64
    copies = min(MAX_CACHES, max(2, COLD_BYTES // num_bytes))
    logits = [
        (3 * torch.randn(n, padded, device="cuda")).to(DTYPE)[:, :vocab] for _ in range(copies)
    ]
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    floats = torch.tensor([[temperature, top_p, min_p, 1.0, 0.0, 0.0]] * n, device="cuda")
    ints = torch.tensor([[top_k, seed, 0] for seed in range(n)], device="cuda")
    token_ids = torch.zeros(n, n + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(rows)

    def run() -> None:
        for part in logits:
            sampling.sample(part, rows, rows, floats, ints, token_ids, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return elapsed(graph.replay, 10) / copies, num_bytes


def seconds_of(calls: list[Callable[[], object]]) -> float:
    """Return the seconds of one call, from a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return elapsed(graph.replay, 5) / len(calls)


def product_calls(
    num_tokens: int, rows: int, columns: int, gated: bool
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return calls of a norm and a product with different weights: by our kernel, and by cuBLAS."""
    copies = min(MAX_CACHES, max(2, COLD_BYTES // (rows * columns * DTYPE.itemsize)))
    weights = [torch.randn(rows, columns, device="cuda", dtype=DTYPE) / 64 for _ in range(copies)]
    x = torch.randn(num_tokens, columns, device="cuda", dtype=DTYPE)
    rms = Norm(torch.ones(columns, device="cuda"), None, 1e-5, False)
    kind = "silu" if gated else None

    def ours(weight: Tensor) -> None:
        (normed,), _ = norm.join(x, None, [rms])
        linear.linear(normed, weight, None, kind, gated)

    def library(weight: Tensor) -> None:
        (normed,), _ = norm.join(x, None, [rms])
        y = F.linear(normed, weight)
        if gated:
            activation.gated_activation(y, "silu")

    return [partial(ours, weight) for weight in weights], [
        partial(library, weight) for weight in weights
    ]


def long_product_times(rows: int, columns: int) -> tuple[float, float]:
    """Return the seconds of a product of PREFILL_TOKENS rows with our algorithm and with PyTorch's.

    They alternate, each running long enough for the GPU's power limit to matter."""
    x = torch.randn(PREFILL_TOKENS, columns, device="cuda", dtype=DTYPE)
    weight = torch.randn(rows, columns, device="cuda", dtype=DTYPE) / 64
    with cublas.choosing():
        cublas.linear(x, weight)
    turns = [partial(cublas.linear, x, weight), partial(F.linear, x, weight)]
    repeats = 1 + int(0.04 / elapsed(turns[1], 1))
    times = [[elapsed(run, repeats) for run in turns] for _ in range(3)]
    chosen, by_pytorch = (median(each) for each in zip(*times, strict=True))
    return chosen, by_pytorch


def norm_calls(
    num_tokens: int, hidden: int, width: int, inner: int
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return calls of two products with a norm between: fused, and with a separate norm kernel."""
    copies = min(MAX_CACHES, max(2, COLD_BYTES // ((width + 2 * inner) * hidden * DTYPE.itemsize)))
    x = torch.randn(num_tokens, width, device="cuda", dtype=DTYPE)
    residual = torch.zeros(num_tokens, hidden, device="cuda", dtype=DTYPE)
    scale = torch.ones(hidden, device="cuda", dtype=DTYPE)
    # Never reset, so the sums are wrong; only the time matters.
    square_sums = torch.zeros(num_tokens, device="cuda", dtype=torch.float64)

    def fused(first: Tensor, second: Tensor) -> None:
        normed = linear.add_norm(x, first, residual, scale, 1e-5, square_sums)
        linear.linear(normed, second, None, "silu", gated=True)

    def separate(first: Tensor, second: Tensor) -> None:
        product = linear.linear(x, first)
        (normed,), _ = norm.join(product, residual, [Norm(scale, None, 1e-5, False)])
        linear.linear(normed, second, None, "silu", gated=True)

    weights = [
        (
            torch.randn(hidden, width, device="cuda", dtype=DTYPE) / 64,
            torch.randn(2 * inner, hidden, device="cuda", dtype=DTYPE) / 64,
        )
        for _ in range(copies)
    ]
    return (
        [partial(fused, *pair) for pair in weights],
        [partial(separate, *pair) for pair in weights],
    )


if __name__ == "__main__":
    main()
