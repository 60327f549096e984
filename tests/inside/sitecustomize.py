"""What Python runs first in every process of an engine that a test has in hand (`serving.in_hand` puts this folder on
its path): by files in the folder that IN_HAND names, a test has the engine take its time, fail, or not begin, for as
long as it wants to look.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

STEP = 0.1
"""Seconds that a step takes while the file `slow` is there: as long as a thousand would take otherwise."""
IN_HAND = Path(os.environ["IN_HAND"])


def wait_to_begin() -> None:
    """While there is a file with the name of the module that this process runs."""
    while any((IN_HAND / word).exists() for word in sys.orig_argv if word.startswith("toolkit.")):
        time.sleep(0.01)


class WorkerInHand(MetaPathFinder):
    """Puts the steps of `toolkit.worker.worker` in a test's hand when it is imported, and not before: it takes torch with it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "toolkit.worker.worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            module.Worker.execute = in_hand(module.Worker.execute)

        spec.loader.exec_module = exec_module
        return spec


def in_hand(execute: Callable[..., object]) -> Callable[..., object]:
    def instead(worker: object, step: object) -> object:
        if (IN_HAND / "broken").exists():
            raise RuntimeError("a kernel met its end")
        if (IN_HAND / "slow").exists():
            time.sleep(STEP)
        return execute(worker, step)

    return instead


wait_to_begin()
sys.meta_path.insert(0, WorkerInHand())
