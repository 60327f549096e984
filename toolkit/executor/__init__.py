"""Runs steps: in process, in ranks, or in a Ray cluster."""

from toolkit.executor.base import Executor, Pending
from toolkit.executor.choose import start_executor
from toolkit.executor.uniproc import UniprocExecutor

__all__ = ["Executor", "Pending", "UniprocExecutor", "start_executor"]
