"""Where a step runs."""

from toolkit.executor.base import Executor, Pending
from toolkit.executor.uniproc import UniprocExecutor

__all__ = ["Executor", "Pending", "UniprocExecutor"]
