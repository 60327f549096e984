"""The interface between the engine's loop and the workers."""

from __future__ import annotations

import abc
from typing import Any, Protocol

from toolkit.sampling.grammar import Masks
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker import WorkerInfo


class Pending(Protocol):
    """A step under way."""

    def result(self) -> ModelOutput:
        """Waits for the step. Raises what made it fail."""

    def constrain(self, masks: Masks) -> None:
        """Lets the step sample, when it has requests bound to a grammar: `masks` has a row for each of them. Called
        before the next step is executed, and while this one computes.
        """


class Executor(abc.ABC):
    """Runs every step on every worker, in order."""

    info: WorkerInfo

    @abc.abstractmethod
    def execute(self, step: SchedulerOutput) -> Pending:
        """Starts a step; steps run in the order of these calls."""

    @abc.abstractmethod
    def collective(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on every worker; the results in rank order."""

    @abc.abstractmethod
    def check_health(self) -> None:
        """Raises when a worker can no longer run steps."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees the devices."""
