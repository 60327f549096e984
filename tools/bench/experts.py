"""Time layers of experts on a GPU: `python -m tools.bench.experts [--kind fp8] [--tune]`.

With `--model FOLDER --batch-sizes 1,8,64`, count the experts that decode steps of a model read.

Each line is a router and its experts, as a replay of a CUDA graph whose calls have other logits and
rotate over layers, so that weights are not in the L2 cache. All experts are equally likely. The
floor is the longer of two times: the bytes of the experts that were chosen at the bandwidth of a
large copy, and the products' FLOPs at the rate of a large bf16 product. The last columns are the
same layer with one token in tiles instead of vectors, and by PyTorch's grouped products of sorted
rows. All figures of a line are of the same calls, which read as many experts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, profiler
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from toolkit.kernels import mxfp4, reference
from toolkit.kernels.gates import ClampedSwiGLU, Gate
from toolkit.kernels.reference import FP8_BLOCK, Routing, Stack
from toolkit.kernels.triton import activation, ahead
from toolkit.kernels.triton.experts import experts, routing
from toolkit.kernels.triton.experts.experts import Operand, Tile, Tiles
from toolkit.kernels.triton.products import grouped_layout
from tools.bench.chosen_experts import print_chosen_experts
from tools.bench.kernels import achieved, copy_bandwidth, elapsed, matmul_rate

DTYPE = torch.bfloat16
COLD_BYTES = 2 << 30  # of experts to read before one is read again
BYTES = {
    "bf16": 2,
    "fp8": 1,
    "fp8-blocks": 1,
    "int4": 0.5 + 2 / 128,
    "int8": 1 + 2 / 128,
    "mxfp4": 17 / 32,
}
MAX_CALLS = 32
THREADS = 16  # that compile
WORD_SHAPES = (
    *((32, 128, stages, 4) for stages in (4, 8)),
    *((32, 128, stages, 2) for stages in (4, 8)),
    *((64, 128, stages, warps) for stages in (3, 6, 8) for warps in (2, 4)),
    *((128, 128, 3, warps) for warps in (4, 8)),
    *((256, 128, stages, 8) for stages in (3, 4)),
)
TOKENS = (1, 8, 64, 256, 2048, 8192)


class Shape(NamedTuple):
    """Sizes of a layer of experts."""

    name: str
    hidden: int
    experts: int
    chosen: int
    size: int

    @property
    def elements(self) -> int:
        """Weights of an expert."""
        return 3 * self.hidden * self.size

    def flops(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.chosen * self.elements


SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, 128, 8, 768),
    Shape("Mixtral-8x7B", 4096, 8, 2, 14336),
    Shape("OLMoE-1B-7B", 2048, 64, 8, 1024),
    Shape("Qwen2-57B-A14B", 3584, 64, 8, 2560),
    Shape("gpt-oss-20b", 2880, 32, 4, 2880),
)


class Weights(NamedTuple):
    """The weights of a layer: arguments of `experts.Layer`."""

    up: Stack
    down: Stack
    activation: Gate = "silu"
    interleaved: bool = False

    @classmethod
    def random(cls, shape: Shape, kind: str, device: torch.device) -> Weights:
        """`kind`: of BYTES. MXFP4 is as gpt-oss has it: with biases and interleaved gates."""
        sizes = (2 * shape.size, shape.hidden), (shape.hidden, shape.size)
        up, down = (cls._stack(shape.experts, *size, kind, device) for size in sizes)
        return cls(up, down, ClampedSwiGLU(), True) if kind == "mxfp4" else cls(up, down)

    @staticmethod
    def _stack(count: int, rows: int, columns: int, kind: str, device: torch.device) -> Stack:
        if kind == "mxfp4":
            steps = mxfp4.num_groups(columns) // mxfp4.GROUPS
            shape = count, steps, rows, mxfp4.GROUP
            words = torch.empty(shape, dtype=torch.int16, device=device)
            scale = torch.full((count, steps, rows), 0x78787878, dtype=torch.int32, device=device)
            bias = torch.randn(count, rows, device=device, dtype=DTYPE)
            return Stack(words.random_(-(2**15), 2**15), scale, bias)
        weight = torch.randn(count, rows, columns, device=device, dtype=DTYPE) / 64
        if kind == "bf16":
            return Stack(weight)
        if kind.startswith("int"):
            return Weights._integers(count, rows, columns, int(kind[3:]), device)
        if kind == "fp8-blocks":
            blocks = count, rows // FP8_BLOCK, -(-columns // FP8_BLOCK)
            scale = torch.rand(blocks, device=device) / 64
            return Stack(weight.to(reference.FP8), scale)
        scale = torch.rand(count, rows, device=device) / 64
        return Stack(weight.to(reference.FP8), scale)

    @staticmethod
    def _integers(count: int, rows: int, columns: int, bits: int, device: torch.device) -> Stack:
        whole = grouped_layout.empty((count * rows, columns), bits, 128, torch.float16, None)
        assert whole is not None, "a supported shape"
        values = whole.values.to(device)
        values.view(torch.int16).random_(-(2**15), 2**15)
        scales = torch.full_like(whole.scales, 2**-bits / 64, device=device)
        parts = (one.view(len(one), count, rows, *one.shape[2:]) for one in (values, scales))
        return Stack(*(one.transpose(0, 1) for one in parts))


class Step(NamedTuple):
    """The input of one call."""

    x: Tensor
    logits: Tensor
    weights: Weights


def expert_bytes(weights: Weights) -> int:
    """Return the size of one expert, without biases."""
    tensors = (*weights.up[:2], *weights.down[:2])
    return sum(one.nbytes // len(one) for one in tensors if one is not None)


def steps(shape: Shape, num_tokens: int, layers: list[Weights]) -> list[Step]:
    """Return inputs of calls that read as many experts as COLD_BYTES, in turn of each layer."""
    device = layers[0].up.values.device
    most = min(shape.experts, num_tokens * shape.chosen) * expert_bytes(layers[0])
    count = min(MAX_CALLS, max(len(layers), COLD_BYTES // most))
    x = torch.randn(num_tokens, shape.hidden, device=device, dtype=DTYPE)
    make = partial(torch.randn, num_tokens, shape.experts, device=device, dtype=DTYPE)
    return [Step(x, make(), layers[i % len(layers)]) for i in range(count)]


def ours(step: Step, how: Routing, tiles: Tiles | None = None) -> Tensor:
    ids, weights = routing.route(step.logits, how)
    return experts.Layer(*step.weights)(step.x, ids, weights, tiles)


def library(step: Step, how: Routing) -> Tensor:
    """Compute a layer by PyTorch: products of rows sorted by expert."""
    x, weights = step.x, step.weights
    scores = step.logits.float().softmax(-1)
    shares, ids = scores.topk(how.num_chosen, dim=-1)
    pairs = ids.flatten().argsort(stable=True)
    one = torch.arange(step.logits.shape[1], device=x.device)
    ends = (ids.flatten()[:, None] <= one).sum(0, dtype=torch.int32)
    rows = x[pairs // how.num_chosen]
    gate_up = functional.grouped_mm(rows, weights.up.values.transpose(1, 2), offs=ends)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = (
        activation.gated_activation(gate_up, "silu") if x.is_cuda else functional.silu(gate) * up
    )
    parts = functional.grouped_mm(inner, weights.down.values.transpose(1, 2), offs=ends)
    placed = torch.empty_like(parts)
    placed[pairs] = parts
    return (placed.view(len(x), -1, x.shape[1]) * shares[..., None].to(x.dtype)).sum(1)


def num_touched(calls: list[Step], how: Routing) -> float:
    """Return the mean number of experts that a call reads."""
    numbers = [
        int(reference.route(step.logits, how)[0].flatten().bincount().count_nonzero())
        for step in calls
    ]
    return sum(numbers) / len(numbers)


def operands(weights: Weights) -> tuple[Operand, Operand]:
    """Return the weights of both products as kernels take them."""
    hidden, size = weights.down.values.shape[-2], weights.up.values.shape[-2] // 2
    return Operand.of(weights.up, hidden), Operand.of(weights.down, size)


def candidates(num_tokens: int, num_chosen: int, weights: Weights) -> Iterator[Tiles]:
    """Yield the best tiles, then others for each product, with those of the other product."""
    best = experts.best_tiles(num_tokens, num_chosen, *operands(weights))
    yield best
    has_words = weights.up.values.dim() == 4
    wide = mxfp4.STEP if has_words else 128 // weights.up.values.itemsize
    shapes = (
        WORD_SHAPES
        if has_words
        else ((32, 128, 5, 2), (64, 64, 6, 4), (64, 128, 3, 4), (64, 256, 3, 4), (128, 64, 4, 4))
        if best.up.tokens <= experts.FEW_PAIRS
        else ((128, wide, 3, 4), (128, wide, 3, 8), (256, wide, 3, 8), (256, wide, 4, 8))
    )
    for rows, columns, stages, warps in shapes:
        tile = Tile(best.up.tokens, rows, columns, stages, warps)
        if tile != best.up:
            yield best._replace(up=tile)
        if tile != best.down:
            yield best._replace(down=tile)
    if num_tokens > experts.FEW_TOKENS:  # other blocks
        for tokens in (best.up.tokens // 2, best.up.tokens * 2):
            if 16 <= tokens <= 128:
                is_few = tokens <= experts.FEW_PAIRS
                rows, columns = (64, 128) if is_few else (2 * tokens, wide)
                tile = Tile(tokens, rows, columns, 4, max(4, tokens // 16))
                yield Tiles(tile, tile)


def seconds(run: Callable[[Step], Tensor], calls: list[Step]) -> float:
    """Return the seconds of a call, from a graph of all."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # which has counters then
        run(calls[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for step in calls:
            run(step)
    return elapsed(graph.replay, 2) / len(calls)


def try_seconds(run: Callable[[Step], Tensor], calls: list[Step]) -> float | None:
    """Return `seconds`, or None if the GPU or the library cannot run it."""
    try:
        return seconds(run, calls)
    except (OutOfResources, RuntimeError) as error:
        print(f"  {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def compile_all(shape: Shape, layer: Weights, how: Routing, tune: bool) -> None:
    """Compile the kernels of all calls, on many threads."""
    with ahead.compiled_side_by_side(THREADS):
        for num_tokens in TOKENS:
            step = steps(shape, num_tokens, [layer])[0]
            most = None if tune else 1
            tried = islice(candidates(num_tokens, shape.chosen, layer), most)
            for tiles in [None, *tried]:
                ours(step, how, tiles)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time layers of experts on this GPU.")
    parser.add_argument("--kind", choices=BYTES, default="bf16", help="of the weights")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel")
    parser.add_argument("--tune", action="store_true", help="print the three best of some tiles")
    parser.add_argument("--shapes", default="", help="only those whose name has this in it")
    parser.add_argument("--model", type=Path, help="folder; count the experts it reads instead")
    parser.add_argument("--batch-sizes", default="1,8,64", metavar="N,...", help="for --model")
    arguments = parser.parse_args()
    if arguments.model is not None:
        sizes = [int(number) for number in arguments.batch_sizes.split(",")]
        print_chosen_experts(arguments.model, sizes)
        return
    torch.manual_seed(0)
    device = torch.device("cuda")
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, "
        f"bf16 {rate / 1e12:.0f} TFLOP/s"
    )
    for shape in SHAPES:
        if arguments.shapes not in shape.name:
            continue
        how = Routing(shape.chosen)
        layer = int(shape.experts * shape.elements * BYTES[arguments.kind])
        layers = [
            Weights.random(shape, arguments.kind, device)
            for _ in range(max(2, -(-COLD_BYTES // layer)))
        ]
        compile_all(shape, layers[0], how, arguments.tune)
        for num_tokens in TOKENS:
            calls = steps(shape, num_tokens, layers)
            print_row(shape, num_tokens, calls, how, bandwidth, rate)
            if arguments.kernels:
                print_kernels(calls, how)
            if arguments.tune and num_tokens > 1:
                print_tiles(num_tokens, calls, how)
        del layers, calls
        torch.cuda.empty_cache()


def print_row(
    shape: Shape, num_tokens: int, calls: list[Step], how: Routing, bandwidth: float, rate: float
) -> None:
    touched, flops = num_touched(calls, how), shape.flops(num_tokens)
    num_bytes = touched * expert_bytes(calls[0].weights)
    taken = seconds(partial(ours, how=how), calls)
    floor = max(num_bytes / bandwidth, flops / rate)
    share = (
        achieved(num_bytes / taken, bandwidth, "TB/s")
        if num_bytes / bandwidth > flops / rate
        else achieved(flops / taken, rate, "TFLOP/s")
    )
    line = f"{shape.name:16s}{num_tokens:6d} tokens {touched:6.1f} experts {taken * 1e6:9.1f} us "
    line += f"{share}  floor {floor * 1e6:9.1f} us"
    both = operands(calls[0].weights)
    if num_tokens == 1 and experts.uses_vector(*both):
        tiles = experts.best_tiles(1, how.num_chosen, *both)
        line += f"  in tiles {seconds(partial(ours, how=how, tiles=tiles), calls) * 1e6:9.1f} us"
    if calls[0].weights.up.scale is None:
        other = try_seconds(partial(library, how=how), calls)
        line += "  PyTorch" + (" -" if other is None else f" {other * 1e6:9.1f} us")
    print(line, flush=True)


def print_kernels(calls: list[Step], how: Routing) -> None:
    """Print the time of each kernel of a call, launched without a graph."""
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        for step in calls:
            ours(step, how)
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda one: -one.device_time_total)[:8]:
        taken = event.device_time_total / len(calls)
        print(f"{'':16s}{taken:9.1f} us  {event.key[:60]}", flush=True)


def print_tiles(num_tokens: int, calls: list[Step], how: Routing) -> None:
    """Print the best tiles of up alone and of down alone, and of other blocks."""
    times = {}
    for tiles in candidates(num_tokens, how.num_chosen, calls[0].weights):
        taken = try_seconds(partial(ours, how=how, tiles=tiles), calls)
        if taken is not None:
            times[tiles] = taken
    for tiles in sorted(times, key=times.__getitem__)[:3]:
        up, down = (tuple(tile) for tile in tiles)
        print(f"{'':16s}{times[tiles] * 1e6:9.1f} us  up {up} down {down}", flush=True)


if __name__ == "__main__":
    main()
