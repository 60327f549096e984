"""Test hooks in the engine's processes. Python imports this module at their start.

`server.hook_environment` puts this folder on their path. Files in the folder TEST_HOOKS act while
they exist: `slow` delays each step, `broken` fails it, and the name of a module delays the start
of processes that run it. With TEST_STEPS=equal, drafts are thought to cost nothing: how many are
verified does not depend on how busy the machine is. With TEST_STEPS=few, startup measures steps of
one request and of all. TEST_METRICS_INTERVAL: between two readings of
/metrics, in seconds. TEST_PROBE_TIMEOUT: for the step that a probe asks for, in seconds; a step is
recent for a fifth of that. TEST_NUM_FILES: limit of open files. Pauses between restarts of an
engine are short.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

METRICS_INTERVAL = 0.01  # seconds between two readings of /metrics: tests read them often
STEP = 0.1  # seconds of a slow step: as long as a thousand others
HOOKS = Path(os.environ["TEST_HOOKS"])


def wait_to_start() -> None:
    """Wait while there is a file with the name of this process' module."""
    while any((HOOKS / word).exists() for word in sys.orig_argv if word.startswith("toolkit.")):
        time.sleep(0.01)


class Hooks(MetaPathFinder):
    """Changes modules when they are imported. Importing them here would import torch."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def change_worker(module: ModuleType) -> None:
    module.Worker.execute = with_hooks(module.Worker.execute)
    if os.environ.get("TEST_STEPS") == "equal":
        from toolkit.scheduler.speculation import StepTimes

        module.WarmUp.step_times = lambda *_: StepTimes(plain=[(1, 1.0), (1000, 1.0)])
    if os.environ.get("TEST_STEPS") == "few":
        sys.modules[module.WarmUp.__module__].STEP_SIZES = (1,)


def change_revival(module: ModuleType) -> None:
    module.BACK_OFF = tuple(seconds / 20 for seconds in module.BACK_OFF)


def change_metrics(module: ModuleType) -> None:
    module.INTERVAL = float(os.environ.get("TEST_METRICS_INTERVAL", METRICS_INTERVAL))


def change_replica(module: ModuleType) -> None:
    module.PROBE_TIMEOUT = float(os.environ.get("TEST_PROBE_TIMEOUT", module.PROBE_TIMEOUT))
    module.STEP_MAX_AGE = module.PROBE_TIMEOUT / 5


CHANGES = {
    "toolkit.engine.cores.replica": change_replica,
    "toolkit.metrics.shared": change_metrics,
    "toolkit.worker.worker": change_worker,
    "toolkit.engine.cores.revival": change_revival,
}


def with_hooks(execute: Callable[..., object]) -> Callable[..., object]:
    def hooked(worker: object, step: object) -> object:
        if (HOOKS / "broken").exists():
            raise RuntimeError("a kernel met its end")
        if (HOOKS / "slow").exists():
            time.sleep(STEP)
        return execute(worker, step)

    return hooked


if "TEST_NUM_FILES" in os.environ:
    resource.setrlimit(resource.RLIMIT_NOFILE, [int(os.environ["TEST_NUM_FILES"])] * 2)
wait_to_start()
for name in CHANGES.keys() & sys.modules.keys():  # in a forked process
    CHANGES.pop(name)(sys.modules[name])
sys.meta_path.insert(0, Hooks())
