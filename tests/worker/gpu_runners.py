"""Fixtures: the GPU's runner on a CPU, with its kernels in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch

from tests.worker.stages import TwoStages
from toolkit.attention.torch import TorchBackend
from toolkit.kernels.table import TritonKernels
from toolkit.scheduler.speculation import StepTimes
from toolkit.worker.startup.warm_up import WarmUp


@pytest.fixture
def gpu_runner(triton_runs: bool, monkeypatch: pytest.MonkeyPatch):
    """Run the GPU's runner on the CPU, with its kernels in Triton's interpreter."""
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    monkeypatch.setattr("toolkit.worker.worker.kernels_for", lambda device: TritonKernels())
    monkeypatch.setattr(WarmUp, "compile", lambda *_: None)  # there is no compiler
    # Of the CPU's runner. It would run steps of one stage alone.
    monkeypatch.setattr(WarmUp, "step_times", lambda *_: StepTimes())


class Rerun:
    """Stands for a CUDA graph: a replay runs the function again, into the tensor it returned."""

    def __init__(self, run: Callable[[], torch.Tensor | None], out: torch.Tensor | None) -> None:
        self._run, self._out = run, out

    def replay(self) -> None:
        result = self._run()
        if result is not None and self._out is not None:
            self._out.copy_(result)

    def reset(self) -> None:
        pass


@pytest.fixture
def rerun_graphs(gpu_runner: None, monkeypatch: pytest.MonkeyPatch):
    """Have the GPU's runner pad steps to those it would capture."""

    def capture(run: Callable[[], torch.Tensor | None], pool: object) -> tuple[Rerun, object]:
        out = run()
        return Rerun(run, out), out

    for module in ("runner", "step_sampler", "drafter"):
        monkeypatch.setattr(f"toolkit.worker.{module}.capture", capture)
    monkeypatch.setattr("toolkit.worker.runner.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(TorchBackend, "is_capturable", True)


@pytest.fixture
def two_stages(gpu_runner: None, monkeypatch: pytest.MonkeyPatch):
    """Have engines with two pipeline stages run both in this process."""
    monkeypatch.setattr("toolkit.engine.llm.start_executor", TwoStages)
