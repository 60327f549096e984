"""What the GPU does during a short part of a run: a Chrome trace, and how much of the time it was busy."""

from __future__ import annotations

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
"""Seconds: hundreds of decode steps of a small model, and a trace that a browser still opens."""

ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a trace's events that keep the GPU busy."""

NUM_KERNELS = 20
"""How many kernels are listed: those that took longest."""


class ProfiledLLM(LLM):
    """An LLM that says when it begins a step."""

    before_step: Callable[[], None] | None = None

    def _step(self, on_step: Callable[[EngineOutputs], None] | None) -> None:
        if self.before_step is not None:
            self.before_step()
        super()._step(on_step)


class _Window:
    """Profiles from the first step that begins after `begin` seconds to the first after WINDOW more.

    Only the GPU's activity and the calls to it are recorded: recording PyTorch's operators too would slow down the
    very loop whose gaps are looked for.
    """

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._start = time.perf_counter()
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.steps = 0
        self.opened = self.closed = False

    def before_step(self) -> None:
        elapsed = time.perf_counter() - self._start
        if not self.opened and elapsed >= self._begin:
            self.profiler.start()
            self.opened = True
            self._end = time.perf_counter() - self._start + WINDOW
        elif self.opened and not self.closed:
            self.steps += 1
            if elapsed >= self._end:
                self.close()

    def close(self) -> None:
        if self.opened and not self.closed:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.closed = True


def profile_window(
    llm: ProfiledLLM, run: Callable[[], object], seconds: float, path: Path
) -> dict[str, Any]:
    """Profiles a part of `run`, which takes about `seconds`, and writes its trace to `path`.

    The part lies in the middle of a long run and is all of a short one. The result has the window's seconds, the
    share of them for which at least one kernel ran, and the kernels that took longest. Raises EngineError when
    nothing was recorded.
    """
    with profile(
        activities=[ProfilerActivity.CUDA]
    ):  # the first use of the profiler takes a second
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    window = _Window(0.4 * seconds if seconds > 2 * WINDOW else 0.0)
    llm.before_step = window.before_step
    try:
        run()
    finally:
        llm.before_step = None
        window.close()
    if not window.closed:
        raise EngineError("The run ended before the profiled part of it began.")
    window.profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ON_THE_GPU]
    if not events:
        raise EngineError(
            "The profiler recorded no kernel: is another profiler attached to the GPU?"
        )
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events]
    length = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "trace": str(path),
        "window_s": round(length / 1e6, 6),
        "steps": window.steps,
        "gpu_busy": round(covered(spans) / length, 4),
        "kernels": longest_kernels(events, length),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def longest_kernels(events: list[dict[str, Any]], length: float) -> list[dict[str, Any]]:
    """Kernels by name, those with the most time first: their share of `length` µs, count and mean µs."""
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
