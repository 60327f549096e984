"""Pipeline stages of the GPU runner match the CPU runner with all layers (Triton interpreter)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.test_cuda_state import PARAMS
from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.distributed import Stage
from toolkit.executor import Executor, Pending
from toolkit.kernels.table import Kernels
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.model_runner import PendingOutput
from toolkit.worker.operations import Operation
from toolkit.worker.startup.warm_up import WarmUp
from toolkit.worker.worker import Worker


class LocalLink:
    """Link between two stages in one process."""

    def __init__(self) -> None:
        self._sent: deque[torch.Tensor] = deque()

    def send(self, x: torch.Tensor) -> None:
        self._sent.append(x.clone())

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._sent.popleft())


class TwoStages(Executor):
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        link: Any = LocalLink()
        self.workers = [Worker(config, folder) for _ in range(2)]
        for index, worker in enumerate(self.workers):
            worker.stage = Stage(index, 2, link)
            self.info = worker.start(lambda name, seconds: None)

    def execute(self, step: SchedulerOutput) -> Pending:
        self.workers[0].execute(step)
        # On a CPU the output is not a copy: the next step overwrites it.
        output = self.workers[1].execute(step).result()
        return PendingOutput(lambda: output)

    def operate(self, operation: Operation) -> Future[None]:
        raise NotImplementedError

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_two_gpu_stages_sample_as_one_cpu_runner(
    checkpoint: Callable[[str], Path], triton_runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter")
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(90) for _ in range(n)]}
        for n in (3, 17, 30, 1, 8, 21, 12, 5, 5)
    ]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **p) for p in PARAMS.values()]
    params[0] = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, prompt_logprobs=1)
    no_repeat, logprobs = {"extra_args": {"no_repeat": 9}}, {"temperature": 0.0, "logprobs": 1}
    params += [
        SamplingParams(max_tokens=4, ignore_eos=True, **one)
        for one in (no_repeat | logprobs, no_repeat | {"seed": 1})
    ]
    settings = {
        "logits_processors": ["tests.inside.plugged:NoRepeat"],
        "max_num_seqs": 5,
        "block_size": 4,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 80,
    }

    def answers(stages: int) -> list[Any]:
        llm = LLM(
            str(checkpoint("gpt2")),
            device="cpu",
            attention_backend="torch",
            pipeline_parallel_size=stages,
            **settings,
        )
        return llm.generate(prompts, params, use_tqdm=False)

    expected = answers(1)
    made: list[TwoStages] = []

    def start(config: EngineConfig, folder: Path, *others: object) -> TwoStages:
        made.append(TwoStages(config, folder))
        return made[-1]

    monkeypatch.setattr("toolkit.engine.llm.start_executor", start)
    monkeypatch.setattr("toolkit.worker.worker.kernels_for", lambda device: Kernels())
    monkeypatch.setattr(WarmUp, "compile", lambda *_: None)  # there is no compiler
    actual = answers(2)
    assert [type(worker.runner).__name__ for worker in made[0].workers] == ["CudaRunner"] * 2
    for a, b in zip(expected, actual, strict=True):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
    for a, b in zip(expected[0].prompt_logprobs[1:], actual[0].prompt_logprobs[1:], strict=True):
        assert {t: x.logprob for t, x in b.items()} == pytest.approx(
            {t: x.logprob for t, x in a.items()}, abs=1e-4
        )
