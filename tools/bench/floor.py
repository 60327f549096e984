"""The least time for the engine benchmarks' work on a machine that computes all prompts and then next tokens, step by step: `python -m
tools.bench.floor FOLDER`.

Each step takes the longer of its arithmetic, at the rate of large matrix products, and of what it reads, at the bandwidth: the weights
once, and the keys and values of its requests. Nothing is counted for activations, sampling, launches or the host.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.attention import AttentionShape
from toolkit.bench import workloads
from toolkit.bench.workloads import Work
from toolkit.models.build import build_model, load_config
from toolkit.models.decoder import Decoder
from toolkit.models.registry import resolve_architecture

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model has to be read and multiplied with."""

    layers: int
    """Parameters of all layers."""
    head: int
    """Parameters."""
    attention: tuple[AttentionShape, ...]
    """Of each layer."""


@dataclass(frozen=True, slots=True)
class Machine:
    bandwidth: float
    """Bytes a second."""
    rate: float
    """FLOPs a second."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The least time for a model's benchmarks, step by step."
    )
    parser.add_argument("folder", type=Path, help="a model's folder; weights in it are not read")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=4.29,
        help="of the memory, TB/s (`tools.bench.kernels` measures it)",
    )
    parser.add_argument(
        "--rate", type=float, default=793.0, help="of large products, TFLOP/s (as that prints, too)"
    )
    given = parser.parse_args()
    machine = Machine(given.bandwidth * 1e12, given.rate * 1e12)
    sizes, context, vocab_size = sizes_of(given.folder)
    for work in works(context, vocab_size):
        seconds = floor(sizes, work, machine)
        prefill = work.name == "prefill"
        tokens = work.num_prompt_tokens if prefill else sum(work.output_lens)
        kind = "prompt" if prefill else "output"
        what = f"{work.name}, {len(work.prompts)} requests"
        print(f"{what:24} {seconds:8.3f} s {tokens / seconds:12,.0f} {kind} tokens/s")


def sizes_of(folder: Path) -> tuple[Sizes, int, int]:
    """(sizes, the longest context, the vocabulary's size) of a decoder in 16 bits."""
    config = load_config(folder)
    model = build_model(config, folder, device=torch.device("meta"), dtype=DTYPE, max_model_len=1)
    assert isinstance(model, Decoder)
    sizes = Sizes(
        layers=sum(parameter.numel() for parameter in model.layers.parameters()),
        head=model.lm_head.weight.numel(),
        attention=tuple(layer.shape for layer in model.attention_layers()),
    )
    return sizes, resolve_architecture(config, str(folder)).max_positions(config), model.vocab_size


def works(context: int, vocab_size: int) -> Iterator[Work]:
    yield workloads.offline(context, vocab_size)
    for batch_size in (1, 8, 64):
        yield workloads.latency(batch_size, vocab_size)
    yield workloads.prefill(context, vocab_size)


def floor(sizes: Sizes, work: Work, machine: Machine) -> float:
    """Seconds, of requests that all run together: all prompts at once, and then a step for each token behind the first."""
    weights = sizes.layers + sizes.head
    weight_bytes = weights * DTYPE.itemsize
    lengths = [len(prompt) for prompt in work.prompts]
    products = 2 * sizes.layers * sum(lengths) + 2 * sizes.head * len(lengths)
    contexts = Counter(context for length in lengths for context in range(1, length + 1))
    multiplied, _ = _attention(sizes, contexts)
    seconds = max((products + multiplied) / machine.rate, weight_bytes / machine.bandwidth)
    for made in range(1, max(work.output_lens)):
        contexts = Counter(
            n + made for n, most in zip(lengths, work.output_lens, strict=True) if most > made
        )
        multiplied, read = _attention(sizes, contexts)
        products = 2 * weights * contexts.total()
        seconds += max(
            (products + multiplied) / machine.rate, (weight_bytes + read) / machine.bandwidth
        )
    return seconds


def _attention(sizes: Sizes, contexts: Counter[int]) -> tuple[int, int]:
    """(FLOPs, bytes of keys and values) of so many tokens with each context, in all layers."""
    flops = num_bytes = 0
    for shape, layers in Counter(sizes.attention).items():
        window = shape.sliding_window or max(contexts)
        seen = layers * sum(min(context, window) * count for context, count in contexts.items())
        flops += 4 * shape.num_heads * shape.head_size * seen
        num_bytes += 2 * shape.num_kv_heads * shape.head_size * DTYPE.itemsize * seen
    return flops, num_bytes


if __name__ == "__main__":
    main()
