"""One worker in the engine's process."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from toolkit.config import EngineConfig
from toolkit.executor.base import Executor, Pending
from toolkit.scheduler import SchedulerOutput
from toolkit.worker import Report
from toolkit.worker.operations import Operation
from toolkit.worker.worker import Worker


class UniprocExecutor(Executor):
    def __init__(self, config: EngineConfig, folder: Path, report: Report) -> None:
        self._worker: Worker | None = Worker(config, folder)
        self.info = self._worker.start(report)

    def execute(self, step: SchedulerOutput) -> Pending:
        assert self._worker is not None, "the executor was shut down"
        return self._worker.execute(step)

    def operate(self, operation: Operation) -> Future[None]:
        assert self._worker is not None, "the executor was shut down"
        return self._worker.operate(operation)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    def check_health(self) -> None:
        if self._worker is None:
            raise RuntimeError("the executor was shut down")

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
