"""The interface between the engine's loop and the workers."""

import abc
from concurrent.futures import Future
from typing import Any, Protocol

from toolkit.sampling.grammar import Masks
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker import WorkerInfo
from toolkit.worker.operations import Operation


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> ModelOutput:
        """Wait for the step. Raises its error."""

    def constrain(self, masks: Masks) -> None:
        """Give masks to a step with grammar-constrained requests, one row each; it samples then.

        Called while this step computes, before the next one is executed."""


class Executor(abc.ABC):
    """Runs every step on every worker, in order."""

    info: WorkerInfo

    @abc.abstractmethod
    def execute(self, step: SchedulerOutput) -> Pending:
        """Start a step. Steps run in the order of these calls."""

    @abc.abstractmethod
    def operate(self, operation: Operation) -> Future[None]:
        """Do an operation on every worker, between steps. Has the error of one that failed."""

    @abc.abstractmethod
    def collective(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker. Return the results in rank order."""

    @abc.abstractmethod
    def check_health(self) -> None:
        """Raise an error if a worker can no longer run steps."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the workers and free the devices."""
