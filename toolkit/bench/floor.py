"""The least time that a machine could take for the engine benchmarks' work: `python -m toolkit.bench.floor FOLDER`.

Prompts take their arithmetic, at the rate of large matrix products: that of the weights, and of attention over what each token
sees. A step of next tokens takes the longer of reading the weights once and multiplying with them, and then reads the keys and values of
its requests. Nothing is counted for activations, sampling, launches or the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.bench import workloads
from toolkit.bench.workloads import Work
from toolkit.models.decoder import Decoder
from toolkit.models.loader import build_model, load_config
from toolkit.models.registry import resolve_architecture

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model has to be read and multiplied with; in parameters, bytes, and numbers of attention heads."""

    layers: int
    """Parameters of all layers."""
    head: int
    kv_bytes: int
    """Of one token, in all layers."""
    attention: int
    """Query heads times head size, of all layers."""


@dataclass(frozen=True, slots=True)
class Machine:
    bandwidth: float
    """Bytes a second."""
    rate: float
    """FLOPs a second."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The least time that a machine could take for a model's benchmarks."
    )
    parser.add_argument("folder", type=Path, help="a model's folder; weights in it are not read")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=4.29,
        help="of the memory, TB/s (`toolkit.kernels.bench` measures it)",
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
    shapes = [layer.shape for layer in model.attention_layers()]
    sizes = Sizes(
        layers=sum(parameter.numel() for parameter in model.layers.parameters()),
        head=model.lm_head.weight.numel(),
        kv_bytes=sum(2 * shape.num_kv_heads * shape.head_size * DTYPE.itemsize for shape in shapes),
        attention=sum(shape.num_heads * shape.head_size for shape in shapes),
    )
    return sizes, resolve_architecture(config, str(folder)).max_positions(config), model.vocab_size


def works(context: int, vocab_size: int) -> Iterator[Work]:
    yield workloads.offline(context, vocab_size)
    for batch_size in (1, 8, 64):
        yield workloads.latency(batch_size, vocab_size)
    yield workloads.prefill(context, vocab_size)


def floor(sizes: Sizes, work: Work, machine: Machine) -> float:
    """Seconds, of requests that all run together: all prompts, and then a step for each token behind the first."""
    weights = sizes.layers + sizes.head
    weight_bytes = weights * DTYPE.itemsize
    lengths = [len(prompt) for prompt in work.prompts]
    products = 2 * sizes.layers * sum(lengths) + 2 * sizes.head * len(lengths)
    attention = sum(4 * sizes.attention * n * (n + 1) // 2 for n in lengths)
    seconds = max((products + attention) / machine.rate, weight_bytes / machine.bandwidth)
    for made in range(1, max(work.output_lens)):
        contexts = [n + made for n, most in zip(lengths, work.output_lens, strict=True) if most > made]
        multiplied = 2 * weights * len(contexts) / machine.rate
        seconds += max(weight_bytes / machine.bandwidth, multiplied)
        seconds += sum(contexts) * sizes.kv_bytes / machine.bandwidth
    return seconds


if __name__ == "__main__":
    main()
