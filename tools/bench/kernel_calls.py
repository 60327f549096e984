"""Calls that `tools.bench.kernels` times: kernels between products, on logits and on state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.kernels.reference import HeadNorm, Norm
from toolkit.kernels.triton import activation, embedding, inputs, norm
from toolkit.kernels.triton.attention import rotary
from toolkit.kernels.triton.products import fp8
from toolkit.kernels.triton.sampling import bitmask, logprobs, penalties

COLD_BYTES = 512 << 20
"""Bytes to access before a tensor is used again, so that it is no longer in the L2 cache."""
BLOCK_SIZE = 16


class KernelRow(NamedTuple):
    """One line of the table."""

    name: str
    calls: list[Callable[[], object]]  # with different tensors
    num_bytes: int  # of one call: each input read once, each output written once


class LayerShape(NamedTuple):
    """Sizes of a transformer layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int


LLAMA = LayerShape(4096, 14336, 32, 8, 128)  # Llama-3.1-8B
QWEN3 = LayerShape(1024, 3072, 16, 8, 128)  # Qwen3-0.6B


class TensorFactory(NamedTuple):
    """Creates random tensors on the kernels' device."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def copies(self, *shape: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return tensors that together overflow the L2 cache, at most 16."""
        first = self.random(*shape, dtype=dtype)
        count = max(2, min(16, COLD_BYTES // max(1, first.nbytes)))
        return [first, *(self.random(*shape, dtype=dtype) for _ in range(count - 1))]

    def integers(self, *shape: int, below: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(below, shape, device=self.device, dtype=dtype)


def layer_rows(
    num_tokens: int, make: TensorFactory, shape: LayerShape = LLAMA
) -> Iterator[KernelRow]:
    """Yield the kernels between the products of a layer."""
    hidden, inner, heads, kv_heads, head_size = shape
    width = (heads + 2 * kv_heads) * head_size
    row = num_tokens * make.dtype.itemsize
    residual, weight = make.random(num_tokens, hidden), make.random(hidden)
    xs = make.copies(num_tokens, hidden)
    yield KernelRow(
        "add and RMS norm",
        [partial(norm.join, x, residual, [Norm(weight, None, 1e-5, False)]) for x in xs],
        row * 4 * hidden,
    )
    yield KernelRow(
        "add and layer norm",
        [partial(norm.join, x, residual, [Norm(weight, weight, 1e-5, True)]) for x in xs],
        row * 4 * hidden,
    )
    yield KernelRow(
        "rows to FP8",
        [partial(fp8.quantize, x) for x in xs],
        row * hidden + num_tokens * (hidden + 4),
    )
    table, half = make.random(32768, hidden), 16384
    tokens = [make.integers(num_tokens, below=32768) for _ in xs]
    shares = [partial(embedding.embed_shard, one, table, half, half) for one in tokens]
    yield KernelRow("rows of half a table", [*shares], row * 3 * hidden // 2)
    blocks = -(-num_tokens // BLOCK_SIZE)
    cache = make.random(2, blocks, BLOCK_SIZE, kv_heads, head_size)
    cos_sin = make.random(num_tokens, 2, head_size // 2)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=make.device)[:num_tokens]
    normed = {"norm": HeadNorm(weight[None, :head_size], weight[None, :head_size], 1e-6)}
    write = partial(
        rotary.qk_norm_rope_write, num_heads=heads, num_kv_heads=kv_heads, cos_sin=cos_sin
    )
    for name, options in (("rotate and write", {}), ("norm, rotate and write", normed)):
        qkvs = make.copies(num_tokens, width)
        calls = [partial(write, qkv, slots, cache[0], cache[1], **options) for qkv in qkvs]
        yield KernelRow(name, [*calls], row * 2 * width)
    gates = [
        partial(activation.gated_activation, gate_up, "silu")
        for gate_up in make.copies(num_tokens, 2 * inner)
    ]
    yield KernelRow("gated activation", [*gates], row * 3 * inner)
    gelus = [partial(activation.activation, x, "gelu_tanh") for x in make.copies(num_tokens, inner)]
    yield KernelRow("GELU", [*gelus], row * 2 * inner)


def logits_rows(n: int, vocab: int, length: int, make: TensorFactory) -> Iterator[KernelRow]:
    """Yield optional kernels on logits `[n, vocab]`, for requests of `length` tokens."""
    rows = torch.arange(n, dtype=torch.int32, device=make.device)
    lengths = torch.full_like(rows, length)
    floats = torch.tensor([[1.0, 1.0, 0.0, 1.1, 0.1, 0.1]] * n, device=make.device)
    ints = torch.tensor([[0, seed, length // 2] for seed in range(n)], device=make.device)
    token_ids = make.integers(n, length, below=vocab)
    wide = make.copies(n, vocab, dtype=torch.float32)
    penalize = [
        partial(penalties.penalize, x, rows, lengths, floats, ints, lengths, token_ids)
        for x in wide
    ]
    # Counts are zeroed. Each token is read twice; its count and its logit are read and written.
    yield KernelRow("penalties", [*penalize], n * (4 * vocab + length * (8 + 16)))
    masks = make.integers(n, -(-vocab // 32), below=2**31 - 1)
    index = torch.arange(n, device=make.device)
    masking = [partial(bitmask.mask_logits, x, index, masks) for x in wide]
    yield KernelRow("grammar masks", [*masking], n * (vocab // 8 + 4 * vocab))
    narrow = make.copies(n, vocab)
    chosen = make.integers(n, below=vocab)
    scoring = [partial(logprobs.logprobs, x, chosen, 0) for x in narrow]
    yield KernelRow(
        "log-probability of the sampled token", [*scoring], n * vocab * make.dtype.itemsize
    )
    scoring = [partial(logprobs.logprobs, x, chosen, 20) for x in narrow]
    # The 20 blocks that are read again come from a cache.
    yield KernelRow("log-probabilities and top 20", [*scoring], n * vocab * make.dtype.itemsize)


def state_rows(num_reqs: int, each: int, context: int, make: TensorFactory) -> Iterator[KernelRow]:
    """Yield kernels for a step's inputs and state: `each` tokens after `context` per request."""
    length = context + each
    rows = torch.arange(num_reqs, dtype=torch.int32, device=make.device)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=make.device) * each
    token_ids = make.integers(num_reqs, length, below=1000)
    table = make.integers(num_reqs, -(-length // BLOCK_SIZE), below=1000)
    num_tokens = num_reqs * each
    ids, positions = (
        torch.empty(num_tokens, dtype=torch.int32, device=make.device) for _ in range(2)
    )
    out = ids, positions, torch.empty(num_tokens, dtype=torch.int64, device=make.device)
    lengths = torch.full_like(rows, length)
    expand = partial(inputs.expand_inputs, rows, starts, lengths, token_ids, table, BLOCK_SIZE, out)
    yield KernelRow("inputs of a step", [expand], num_reqs * 12 + num_tokens * (4 + 4 + 16))
    begins = rows * each
    columns = torch.full_like(rows, context)
    runs = torch.stack((rows, columns, begins, torch.full_like(rows, each)), 1).contiguous()
    values = make.integers(num_tokens, below=1000)
    copy = partial(inputs.copy_runs, token_ids, runs, values, each)
    yield KernelRow("runs into the state", [copy], num_reqs * 16 + num_tokens * 8)


def fp8_products(
    num_tokens: int, rows: int, columns: int, gated: bool, make: TensorFactory
) -> list[Callable[[], object]]:
    """Return calls of a norm and a product with an FP8 weight, with different weights."""
    copies = min(64, max(2, COLD_BYTES // (rows * columns)))
    x, rms = make.random(num_tokens, columns), Norm(make.random(columns), None, 1e-5, False)
    weights = [make.random(rows, columns, dtype=torch.float8_e4m3fn) for _ in range(copies)]
    scale = torch.ones(rows, device=make.device)
    kind = "silu" if gated else None

    def call(weight: Tensor) -> None:
        (normed,), _ = norm.join(x, None, [rms])
        fp8.linear(normed, weight, scale, None, kind, gated)

    return [partial(call, weight) for weight in weights]
