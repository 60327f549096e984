"""GPU profile of a short part of a run: a Chrome trace and the fraction of busy time."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from toolkit.engine.llm import LLM
from toolkit.engine.messages import EngineOutputs
from toolkit.errors import EngineError

WINDOW = 0.35
"""Seconds: hundreds of decode steps of a small model, and a trace that a browser can open."""

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of trace events that keep the GPU busy."""

NUM_KERNELS = 20  # kernels to list


class ProfiledLLM(LLM):
    """An LLM that calls `before_step` before each step."""

    before_step: Callable[[], None] | None = None

    def _step(self, on_step: Callable[[EngineOutputs], None] | None) -> bool:
        if self.before_step is not None:
            self.before_step()
        return super()._step(on_step)


class _ProfileWindow:
    """Profiles from the first step after `begin` seconds to the first step WINDOW seconds later.

    Records only GPU activity and the calls to it: recording PyTorch's operators would slow down the
    loop whose gaps are of interest."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._start = time.perf_counter()
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.steps = 0
        self.is_open = self.is_closed = False

    def before_step(self) -> None:
        elapsed = time.perf_counter() - self._start
        if not self.is_open and elapsed >= self._begin:
            self.profiler.start()
            self.is_open = True
            self._end = time.perf_counter() - self._start + WINDOW
        elif self.is_open and not self.is_closed:
            self.steps += 1
            if elapsed >= self._end:
                self.close()

    def close(self) -> None:
        if self.is_open and not self.is_closed:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.is_closed = True


def profile_window(
    llm: ProfiledLLM, run: Callable[[], object], seconds: float, path: Path
) -> dict[str, Any]:
    """Profile a part of `run`, which takes about `seconds`, and write its trace to `path`.

    The part is in the middle of a long run, or all of a short one. Returns the window's length, the
    fraction of it in which a kernel ran, and the kernels that took longest. Raises EngineError if
    nothing was recorded."""
    start_profiler()
    window = _ProfileWindow(0.4 * seconds if seconds > 2 * WINDOW else 0.0)
    llm.before_step = window.before_step
    try:
        run()
    finally:
        llm.before_step = None
        window.close()
    if not window.is_closed:
        raise EngineError("The run ended before the profiler started. Use a longer workload.")
    return {"trace": str(path), "steps": window.steps, **summarize(window.profiler, path)}


def start_profiler() -> None:
    """Use the profiler for the first time, which takes a second."""
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


def summarize(profiler: profile, path: Path) -> dict[str, Any]:
    """Write the trace of a profile to `path`, and return the fraction of busy time and the kernels.

    Raises EngineError if nothing was recorded."""
    profiler.export_chrome_trace(str(path))
    events = [
        e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in GPU_CATEGORIES
    ]
    if not events:
        raise EngineError(
            "The profiler recorded no kernel. Is another profiler attached to the GPU?"
        )
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events]
    length = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "window_s": round(length / 1e6, 6),
        "gpu_busy": round(union_length(spans) / length, 4),
        "kernels": longest_kernels(events, length),
    }


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def longest_kernels(events: list[dict[str, Any]], length: float) -> list[dict[str, Any]]:
    """Return the kernels with the most time: name, share of `length` µs, count and mean µs."""
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event["name"], []).append(event["dur"])
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    return [
        {
            "name": name,
            "share": round(sum(durations) / length, 4),
            "count": len(durations),
            "mean_us": round(sum(durations) / len(durations), 2),
        }
        for name, durations in ranked
    ]
