"""Where a step runs."""

from toolkit.executor.base import Executor, Pending
from toolkit.executor.choose import start_executor
from toolkit.executor.uniproc import UniprocExecutor

__all__ = ["Executor", "Pending", "UniprocExecutor", "start_executor"]
