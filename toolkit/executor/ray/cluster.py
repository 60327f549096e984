"""What an engine asks of a Ray cluster: to be let in, and room for its devices."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from types import ModuleType
from typing import Any

from toolkit.config import EngineConfig
from toolkit.config.engine import ENGINE, ParallelConfig
from toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds in which room may come free: what an engine before had, or another machine's."""
SOON = 2.0
"""Seconds after which it is said that there is none yet."""


class Cluster:
    """The cluster, while this process is one of its drivers. It leaves with the last that needs it."""

    _num_users = 0
    _joined = False
    """Whether the first of them made this process a driver, and not its user."""

    def __init__(self) -> None:
        """Finds it as Ray does: by RAY_ADDRESS, else the one that was started on this machine. Raises ConfigError."""
        self.ray = _import()
        if not self.ray.is_initialized():
            _join(self.ray)
            Cluster._joined = True
        Cluster._num_users += 1
        self._uses = True
        self.own_node: str = self.ray.get_runtime_context().get_node_id()

    def addresses(self) -> dict[str, str]:
        """Of the machines, by node."""
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes()}

    def place(self, config: EngineConfig) -> tuple[str, Any]:
        """(resource, placement group): a bundle for each rank, on as few machines as can be. Raises ConfigError when there is no room."""
        from ray.util.placement_group import placement_group, remove_placement_group

        wanted, device = config.parallel.world_size, config.device.device
        gpus = device == "cuda" or (device == "auto" and self._total("GPU") > 0)
        resource = "GPU" if gpus else "CPU"
        bundles = [{resource: 1.0}] * wanted
        node = self.own_share(resource, config.parallel)
        if node is not None:
            group = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=node)
            if group.wait(SOON):
                return resource, group
            remove_placement_group(group)  # that is taken: over several machines, then
        group = placement_group(bundles, strategy="PACK")
        try:
            if not group.wait(SOON):
                logger.warning("%s Waiting for room.", self._room(resource, wanted))
                if not group.wait(PATIENCE):
                    raise _refusal(
                        f"{self._room(resource, wanted)} None came free in {PATIENCE:g} s. Add machines (ray start "
                        "--address=HOST:6379), end what holds them (ray status shows it), or lower --tensor-parallel-size, "
                        "--pipeline-parallel-size or --data-parallel-size."
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        return resource, group

    def own_share(self, resource: str, parallel: ParallelConfig) -> str | None:
        """Of several engines, each is for another machine of those that can hold one whole: which."""
        if parallel.data_parallel_size == 1:
            return None
        large = [
            node
            for node in self._nodes()
            if node["Resources"].get(resource, 0) >= parallel.world_size
        ]
        names = sorted(node["NodeID"] for node in large)
        return names[int(os.environ.get(ENGINE, "0")) % len(names)] if names else None

    def leave(self) -> None:
        """Once, however often it is called."""
        if not self._uses:
            return
        self._uses = False
        Cluster._num_users -= 1
        if Cluster._joined and not Cluster._num_users:
            Cluster._joined = False
            self.ray.shutdown()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _total(self, resource: str) -> int:
        return sum(int(node["Resources"].get(resource, 0)) for node in self._nodes())

    def _room(self, resource: str, wanted: int) -> str:
        """What there is, in a sentence."""
        free = int(self.ray.available_resources().get(resource, 0))
        each = ", ".join(
            f"{node['NodeManagerAddress']} has {int(node['Resources'].get(resource, 0))}"
            for node in self._nodes()
        )
        needs = f"{wanted} {resource}{'s' if wanted > 1 else ''}"
        return f"The engine needs {needs}, and the Ray cluster has {free} free of {self._total(resource)} ({each})."


def _import() -> ModuleType:
    # What Ray says of processes that ended would be on standard output, where answers are; it is in the log in our words.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise _refusal(
            "--distributed-executor-backend ray needs Ray on every machine: pip install 'tk-llm[ray]'."
        ) from None
    return ray


def _join(ray: ModuleType) -> None:
    """Ray takes SIGTERM for itself, which is given back."""
    given = os.environ.get("RAY_ADDRESS", "")
    _require_answer(given)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        said = str(error).splitlines()[0]
        none = "Could not find" in said
        what = (
            "No Ray cluster runs here, and RAY_ADDRESS names none"
            if none
            else f"Ray cannot be joined ({said})"
        )
        raise _refusal(
            f"{what}. ray start --head starts one, ray start --address=HOST:6379 adds another machine; tk runs on one of them."
        ) from None
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _require_answer(address: str) -> None:
    """Ray would wait for minutes for what is not there."""
    host, _, port = address.rpartition(":")
    if address.startswith("ray://"):
        raise _refusal(
            f"RAY_ADDRESS is {address}: tk runs on a machine of the cluster; give HOST:6379, or nothing."
        )
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise _refusal(
            f"RAY_ADDRESS is {address}, and no Ray cluster answers there ({error})."
        ) from None


def _refusal(message: str) -> ConfigError:
    return ConfigError(message, param="distributed_executor_backend")
