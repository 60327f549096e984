"""Lower bounds of the engine benchmarks' times on a machine: `python -m tools.bench.floor FOLDER`.

All prompts are computed in one step, then the other tokens step by step. Each step takes the longer
of its arithmetic, at the rate of large matrix products, and its reads, at the bandwidth: the
weights once, and the keys and values of its requests. Activations, sampling, launches and the host
count as zero."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.attention import Attention, AttentionShape
from toolkit.bench import workloads
from toolkit.bench.workloads import Workload
from toolkit.kernels.reference import first_key
from toolkit.models.build import build_model, load_config
from toolkit.models.config.registry import describe
from toolkit.models.decoder import Decoder

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model that its arithmetic and reads depend on."""

    layers: int  # parameters of all layers
    head: int  # parameters of the LM head
    attention: tuple[AttentionShape, ...]  # of each layer


@dataclass(frozen=True, slots=True)
class Machine:
    bandwidth: float  # bytes per second
    rate: float  # FLOPs per second


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Lower bounds of the times of a model's benchmarks."
    )
    parser.add_argument("folder", type=Path, help="model folder; weights are not read")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=4.29,
        help="memory bandwidth in TB/s (`tools.bench.kernels` measures it)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=793.0,
        help="rate of large products in TFLOP/s (also measured)",
    )
    args = parser.parse_args()
    machine = Machine(args.bandwidth * 1e12, args.rate * 1e12)
    sizes, context, vocab_size = load_sizes(args.folder)
    for work in all_workloads(context, vocab_size):
        seconds = minimum_seconds(sizes, work, machine)
        is_prefill = work.name == "prefill"
        tokens = work.num_prompt_tokens if is_prefill else sum(work.output_lens)
        kind = "prompt" if is_prefill else "output"
        label = f"{work.name}, {len(work.prompts)} requests"
        print(f"{label:24} {seconds:8.3f} s {tokens / seconds:12,.0f} {kind} tokens/s")


def load_sizes(folder: Path) -> tuple[ModelSizes, int, int]:
    """Return (sizes, context length, vocabulary size) of a decoder in 16 bits."""
    config = load_config(folder)
    model = build_model(config, device=torch.device("meta"), dtype=DTYPE, max_model_len=1)
    assert isinstance(model, Decoder)
    sizes = ModelSizes(
        layers=sum(parameter.numel() for parameter in model.layers.parameters()),
        head=math.prod(model.lm_head.weight.shape),
        attention=tuple(one.shape for one in model.modules() if isinstance(one, Attention)),
    )
    return sizes, describe(config).max_positions, model.vocab_size


def all_workloads(context: int, vocab_size: int) -> Iterator[Workload]:
    yield workloads.offline(context, vocab_size)
    for batch_size in (1, 8, 64):
        yield workloads.latency(batch_size, vocab_size)
    yield workloads.prefill(context, vocab_size)


def minimum_seconds(sizes: ModelSizes, work: Workload, machine: Machine) -> float:
    """Return the seconds of a workload: one step for all prompts, then one for each later token."""
    weights = sizes.layers + sizes.head
    weight_bytes = weights * DTYPE.itemsize
    lengths = [len(prompt) for prompt in work.prompts]
    products = 2 * sizes.layers * sum(lengths) + 2 * sizes.head * len(lengths)
    contexts = Counter(context for length in lengths for context in range(1, length + 1))
    multiplied, _ = _attention(sizes, contexts)
    seconds = max((products + multiplied) / machine.rate, weight_bytes / machine.bandwidth)
    for step in range(1, max(work.output_lens)):
        contexts = Counter(
            n + step for n, limit in zip(lengths, work.output_lens, strict=True) if limit > step
        )
        multiplied, read = _attention(sizes, contexts)
        products = 2 * weights * contexts.total()
        seconds += max(
            (products + multiplied) / machine.rate, (weight_bytes + read) / machine.bandwidth
        )
    return seconds


def _attention(sizes: ModelSizes, contexts: Counter[int]) -> tuple[int, int]:
    """Return (FLOPs, KV cache bytes) of all layers. `contexts` counts tokens by context."""
    flops = num_bytes = 0
    for shape, layers in Counter(sizes.attention).items():
        reach = shape.sliding_window, shape.chunk
        seen = layers * sum(
            (context - max(0, first_key(context - 1, *reach))) * count
            for context, count in contexts.items()
        )
        flops += 4 * shape.num_heads * shape.head_size * seen
        num_bytes += 2 * shape.num_kv_heads * shape.head_size * DTYPE.itemsize * seen
    return flops, num_bytes


if __name__ == "__main__":
    main()
