"""Pipeline stages of the GPU's runner in one process."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from toolkit.config import EngineConfig
from toolkit.distributed import Stage
from toolkit.executor import Executor, Pending
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.operations import Operation
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
    """Runs each step in both stages, one after the other.

    Two steps are in flight, with the same buffers: outputs must be copies (`to_host`)."""

    def __init__(self, config: EngineConfig, folder: Path, *others: object) -> None:
        link: Any = LocalLink()
        self.workers = [Worker(config, folder) for _ in range(2)]
        for index, worker in enumerate(self.workers):
            worker.stage = Stage(index, 2, link)
            self.info = worker.start(lambda name, seconds: None)
        self._worker = self.workers[-1]

    def execute(self, step: SchedulerOutput) -> Pending:
        self.workers[0].execute(step)
        return self._worker.execute(step)

    def operate(self, operation: Operation) -> Future[None]:
        raise NotImplementedError

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
