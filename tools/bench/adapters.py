"""Time steps with LoRA adapters on a GPU: `python -m tools.bench.adapters`.

Two engines of a model with random weights run in turn: one without adapters, one with random
adapters of rank 16 on all linear layers. Each step is the replay of its CUDA graph. Prints the
median milliseconds of several rounds, and how much of the base's throughput is lost."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from toolkit import LLM
from toolkit.layers import Linear
from toolkit.lora.gpu_weight import GPUAdaptedWeight
from toolkit.lora.peft import Pair
from toolkit.lora.weight import Part
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.sequence import SequenceSpec
from toolkit.weights.weight import ALL
from toolkit.worker.runner import Runner
from tools.bench.models import CONFIGS, make_model

ROUNDS = 9
SECONDS = 0.15  # of a case in a round
STEPS = {"1 request": (1, 1), "64 requests": (64, 1), "prompt of 2048 tokens": (1, 2048)}
"""Requests and tokens of each."""
TARGETS = {
    ("1 request", 0): 1,
    ("1 request", 1): 6,
    ("64 requests", 0): 1,
    ("64 requests", 1): 6,
    ("64 requests", 8): 10,
    ("64 requests", 64): 30,
}
"""Most percent of throughput lost, by number of adapters; 0: enabled, but none in use."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps with LoRA adapters.")
    parser.add_argument("--model", choices=CONFIGS, default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-lora-rank", type=int, help="of the engine; default: the rank")
    parser.add_argument("--max-loras", type=int, default=64)
    parser.add_argument("--context", type=int, default=250, metavar="TOKENS")
    parser.add_argument("--quantization", choices=("fp8", "int4"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), CONFIGS[args.model])
        settings = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "quantization": args.quantization,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory": 4,  # GB
            "swap_space": 0,
        }
        base = LLM(folder, **settings)
        adapted = LLM(
            folder,
            **settings,
            enable_lora=True,
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank or args.rank,
        )
        place_random(adapted, args.rank)
        measure(base, adapted, args.context, args.max_loras)
        adapted.shutdown()
        base.shutdown()


def measure(base: LLM, adapted: LLM, context: int, max_loras: int) -> None:
    cases: dict[tuple[str, int | None], Replay] = {}
    for name, (requests, tokens) in STEPS.items():
        step = make_step(requests, tokens, context)
        cases[name, None] = Replay(base, step, 0)
        for count in (0, 1, 8, 64):
            if count <= min(requests, max_loras):
                cases[name, count] = Replay(adapted, step, count)
    times: dict[tuple[str, int | None], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for case, replay in cases.items():
            times[case].append(replay.milliseconds())
    for (name, used), found in times.items():
        took, alone = median(found), median(times[name, None])
        lost = 100 * (1 - alone / took)
        label = "base" if used is None else f"{used} adapters" if used else "enabled, not used"
        target = None if used is None else TARGETS.get((name, used))
        verdict = "" if target is None else f"   target {target} %{'' if lost <= target else ' !'}"
        print(f"{name:24}{label:20}{took:9.3f} ms{lost:8.1f} % lost{verdict}")


class Replay:
    """A step of an engine, whose requests use `count` adapters in turn. 0: none."""

    def __init__(self, llm: LLM, step: SchedulerOutput, count: int) -> None:
        self._worker = _worker(llm)
        self._runner: Runner = self._worker.runner
        self._step = step
        index = np.arange(len(step.rows))
        self._slots = index % count + 1 if count else np.zeros_like(index)

    @torch.inference_mode()
    def milliseconds(self) -> float:
        """Return the time of one replay, averaged over about SECONDS."""
        with self._worker.on_stream():
            state = self._runner.state
            state.apply(self._step)
            state.adapters[self._step.rows] = self._slots
            state.send(self._step)
            graph = self._runner._graph_for(self._step)
            assert graph is not None, "the step has a graph"
            number = max(3, int(1e3 * SECONDS / _milliseconds(graph.graph, 2)))
            return _milliseconds(graph.graph, number)


def _worker(llm: LLM) -> Any:
    """Return the engine's worker, which is in this process."""
    core: Any = llm._core
    return core.executor._worker


def _milliseconds(graph: torch.cuda.CUDAGraph, number: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    for _ in range(number):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / number


def make_step(requests: int, tokens: int, context: int) -> SchedulerOutput:
    """Return a step in which each request has so many tokens, after a context if it is one."""
    computed = context if tokens == 1 else 0
    blocks = -(-(computed + tokens) // 16)
    ids = np.random.default_rng(0).integers(0, 1000, (requests, computed + tokens)).tolist()
    params = SamplingParams(temperature=0.0)
    rows = np.arange(requests, dtype=np.int32)
    return SchedulerOutput(
        step=-1,
        rows=rows,
        num_tokens=np.full(requests, tokens, np.int32),
        num_computed=np.full(requests, computed, np.int32),
        samples=np.ones(requests, np.bool_),
        new_rows=[
            NewRow(
                row=row,
                spec=SequenceSpec(
                    prompt_token_ids=ids[row], params=params, max_tokens=1, eos_token_ids=[]
                ),
                seed=0,
                output_token_ids=[],
                num_computed_tokens=computed,
                blocks=[list(range(row * blocks, (row + 1) * blocks))],
            )
            for row in range(requests)
        ],
    )


def place_random(llm: LLM, rank: int) -> None:
    """Fill all slots with random adapters on all linear layers."""
    worker = _worker(llm)
    active = worker.runner.adapters.active
    layers = [
        (one, one.weight)
        for one in worker.runner.model.modules()
        if isinstance(one, Linear) and isinstance(one.weight, GPUAdaptedWeight)
    ]
    with worker.on_stream(), torch.inference_mode(), torch.device("cuda"):
        for slot in range(1, active.num_slots + 1):
            active.place(slot, rank)
            for linear, weight in layers:
                rows, columns = weight.shape
                low = torch.randn(len(linear.parts) * rank, columns) / columns**0.5
                weight.place(slot, [Part(ALL, Pair(low, torch.randn(rows, rank) * 0.01))])
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
