"""Choose the executor for an engine's settings."""

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
    """Load the model, in this process or in ranks.

    `on_failure`: see `MultiprocExecutor`. `parent`: folder for files that ranks of this machine
    share. Raises ToolkitError; WorkersLostError if a rank ended for no reason of the user's."""
    backend = config.parallel.distributed_executor_backend
    if config.parallel.world_size == 1 and backend == "mp":
        return UniprocExecutor(config, folder, report)
    from toolkit.executor.checks import require_size
    from toolkit.executor.multiproc import MultiprocExecutor
    from toolkit.executor.ranks import Ranks

    require_size(config, folder)
    ranks: Ranks
    if backend == "ray":
        from toolkit.executor.ray.ranks import Actors

        ranks = Actors(config, folder, log or LogStyle())
    else:
        from toolkit.executor.local_ranks import Processes

        ranks = Processes(config, folder, log or LogStyle(), parent)
    return MultiprocExecutor(config, folder, report, ranks, on_failure)
