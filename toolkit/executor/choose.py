"""Which executor an engine's settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toolkit.config import EngineConfig
from toolkit.executor.base import Executor
from toolkit.executor.uniproc import UniprocExecutor
from toolkit.logs import LogStyle
from toolkit.worker import Report


def start_executor(
    config: EngineConfig,
    folder: Path,
    report: Report,
    log: LogStyle | None = None,
    on_failure: Callable[[str, str], None] | None = None,
    parent: Path | None = None,
) -> Executor:
    """Loads the model, in this process or over as many as the settings say; the rest: see `MultiprocExecutor`.

    Raises ToolkitError for what the user can mend, WorkersLostError for a rank that ended without a reason that one could.
    """
    if config.parallel.tensor_parallel_size == 1:
        return UniprocExecutor(config, folder, report)
    from toolkit.executor.multiproc import MultiprocExecutor

    return MultiprocExecutor(config, folder, report, log or LogStyle(), on_failure, parent)
