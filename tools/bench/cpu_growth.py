"""CPU decode speed by batch size and context: `python -m tools.bench.cpu_growth [--svg FILE]`.

Without --model: GPT-2's shape (124M) with random weights. Each speed is compared with the machine's
limit, from the memory bandwidth and the arithmetic rate that the same run measures: a step reads
every weight and every cached key and value once, and multiplies every weight by every request's
token."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.bench.report.plots import Axis, Chart
from tools.bench.versus_transformers import make_gpt2

if TYPE_CHECKING:
    from toolkit.engine.llm import LLM

STYLE = """
svg { font: 11px system-ui, sans-serif; background: #fff; color: #1a1a1a }
text { fill: #555 } .grid, .axis { stroke: #ddd }
.line { fill: none; stroke: currentColor; stroke-width: 1.8 }
.s0 { color: #1f6feb } .s1 { color: #d1570a }
.limit { stroke-dasharray: 5 4; opacity: .7 } .cursor { display: none }
@media (prefers-color-scheme: dark) {
svg { background: #111 } text { fill: #aaa } .grid, .axis { stroke: #333 } }
"""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Limits of the machine, and the sizes of the model that a step depends on."""

    bandwidth: float  # bytes read per second
    rate: float  # operations per second with weights of the model's type
    weight_bytes: int
    kv_bytes: int  # of one token, all layers
    flops: int  # of one token

    def tokens_per_second(self, batch: int, context: int) -> float:
        num_bytes = self.weight_bytes + batch * context * self.kv_bytes
        return batch / max(num_bytes / self.bandwidth, batch * self.flops / self.rate)


@dataclass(frozen=True, slots=True)
class Measurement:
    batch: int
    context: int
    tokens_per_second: float
    limit: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description="CPU decode speed by batch size and context, with the machine's limits."
    )
    parser.add_argument("--model", help="model folder; default: GPT-2's shape, random weights")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 256, 512, 992], metavar="N"
    )
    parser.add_argument(
        "--steps", type=int, default=16, help="steps per measurement; the best of three counts"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="plot the shortest and the longest context"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if not args.model:
            make_gpt2(Path(scratch))
        from toolkit.engine.llm import LLM

        llm = LLM(
            args.model or scratch,
            device="cpu",
            dtype=args.dtype,
            quantization=args.quantization,
            max_num_seqs=max(args.batches),
        )
        kind = args.quantization or args.dtype
        limits = measure_limits(llm, kind)
        print(
            f"reads {limits.bandwidth / 1e9:.1f} GB/s, {kind} {limits.rate / 1e9:.0f} "
            "G operations/s",
            file=sys.stderr,
        )
        points = list(measure(llm, limits, args.batches, args.contexts, args.steps))
    print(json.dumps([asdict(point) for point in points]) if args.json else table(points))
    if args.svg:
        args.svg.write_text(plot(points))


def measure_limits(llm: LLM, kind: str) -> MachineLimits:
    """Measure the limits for weights of type `kind`, a name of PyTorch's."""
    import torch

    from toolkit.kernels.cpu import probe
    from tools.bench import cpu_kernels as bench

    info = llm.info
    bandwidth = bench.read_bandwidth()
    rate = max(probe.multiply(getattr(torch, kind)) for _ in range(5))
    kv_bytes = info.cache_bytes // (info.num_blocks * info.block_size)
    return MachineLimits(bandwidth, rate, info.weight_bytes, kv_bytes, 2 * info.num_parameters)


def measure(
    llm: LLM, limits: MachineLimits, batches: list[int], contexts: list[int], steps: int
) -> Iterator[Measurement]:
    """Time `steps` decode steps for each context and batch. Prompts are in the prefix cache."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10_000) for _ in range(max(contexts))] for _ in range(max(batches))]
    for context in contexts:
        for batch in batches:
            selected = [prompt[:context] for prompt in prompts[:batch]]
            generate(llm, selected, 1)
            first = min(generate(llm, selected, 1) for _ in range(2))
            best = min(generate(llm, selected, 1 + steps) for _ in range(3)) - first
            limit = limits.tokens_per_second(batch, context + steps // 2)
            yield Measurement(batch, context, round(batch * steps / best, 1), round(limit, 1))
            print(f"context {context}, batch {batch} done", file=sys.stderr)


def generate(llm: LLM, prompts: list[list[int]], count: int) -> float:
    """Generate `count` tokens for each prompt. Returns the seconds."""
    from toolkit.sampling.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def table(points: list[Measurement]) -> str:
    """Return a Markdown table of tokens/s (share of the limit) by batch and context."""
    contexts = sorted({point.context for point in points})
    lines = ["| batch | " + " | ".join(f"context {context}" for context in contexts) + " |"]
    lines.append("|---" * (1 + len(contexts)) + "|")
    for batch in sorted({point.batch for point in points}):
        cells = {
            point.context: f"{point.tokens_per_second:.0f} "
            f"({point.tokens_per_second / point.limit:.0%})"
            for point in points
            if point.batch == batch
        }
        lines.append(
            f"| {batch} | " + " | ".join(cells.get(context, "") for context in contexts) + " |"
        )
    return "\n".join(lines)


def plot(points: list[Measurement]) -> str:
    """Return an SVG of tokens/s by batch for the shortest and the longest context. Limits are
    dashed."""
    contexts = sorted({point.context for point in points})
    speeds = [value for point in points for value in (point.tokens_per_second, point.limit)]
    batches = sorted({point.batch for point in points})
    y = Axis.logarithmic("tokens/s", min(speeds), max(speeds))
    x = Axis(
        "requests at once",
        batches[0],
        batches[-1],
        tuple((b, str(b)) for b in batches),
        is_log=True,
    )
    chart = Chart("Decode speed on this CPU", x, y)
    for style, context in enumerate(dict.fromkeys((contexts[0], contexts[-1]))):
        selected = sorted((p for p in points if p.context == context), key=lambda p: p.batch)
        xs = [point.batch for point in selected]
        speeds = [point.tokens_per_second for point in selected]
        limits = [point.limit for point in selected]
        chart.line(f"context {context}", f"s{style}", xs, speeds)
        chart.line(f"limit at {context}", f"s{style} limit", xs, limits)
    found = re.search(r"<svg .*?</svg>", chart.svg(), re.DOTALL)
    assert found is not None, "a chart is an SVG element"
    labels = "".join(
        f'<text x="80" y="{28 + 15 * style}" class="s{style}" style="fill: currentColor">'
        f"context {context} (dashed: limit)</text>"
        for style, context in enumerate(dict.fromkeys((contexts[0], contexts[-1])))
    )
    svg = found[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return re.sub(r"(<svg [^>]*>)", rf"\1<style>{STYLE}</style>", svg, count=1).replace(
        "</svg>", f"{labels}</svg>"
    )


if __name__ == "__main__":
    main()
