"""Joining a Ray cluster, and reserving devices in it."""

import logging
import os
import signal
import socket
import threading
from types import ModuleType
from typing import Any

from toolkit.config import EngineConfig
from toolkit.config.engine import ENGINE_VARIABLE, ParallelConfig
from toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

ROOM_TIMEOUT = 30.0  # seconds to wait for devices to become free
ROOM_NOTICE = 2.0  # seconds after which the wait is logged


class Cluster:
    """The cluster, while this process is one of its drivers: until the last user leaves."""

    _num_users = 0
    _joined = False  # True if this class made the process a driver, and not its user

    def __init__(self) -> None:
        """Join the cluster at RAY_ADDRESS, else the one of this machine. Raises ConfigError."""
        self.ray = _import()
        if not self.ray.is_initialized():
            _join(self.ray)
            Cluster._joined = True
        Cluster._num_users += 1
        self._uses = True
        self.own_node: str = self.ray.get_runtime_context().get_node_id()

    def addresses(self) -> dict[str, str]:
        """Return the machines' addresses by node id."""
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes()}

    def place(self, config: EngineConfig) -> tuple[str, Any]:
        """Return (resource, placement group): one bundle per rank, on as few machines as possible.

        Raises ConfigError if the cluster has no room."""
        from ray.util.placement_group import placement_group, remove_placement_group

        wanted, device = config.parallel.world_size, config.device.device
        gpus = device == "cuda" or (device == "auto" and self._total("GPU") > 0)
        resource = "GPU" if gpus else "CPU"
        bundles = [{resource: 1.0}] * wanted
        node = self.own_node_for_engine(resource, config.parallel)
        if node is not None:
            group = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=node)
            if group.wait(ROOM_NOTICE):
                return resource, group
            remove_placement_group(group)  # taken: use several machines
        group = placement_group(bundles, strategy="PACK")
        try:
            if not group.wait(ROOM_NOTICE):
                logger.warning("%s Waiting for room.", self._room_sentence(resource, wanted))
                if not group.wait(ROOM_TIMEOUT):
                    raise _config_error(
                        f"{self._room_sentence(resource, wanted)} None became free in "
                        f"{ROOM_TIMEOUT:g} s. Add machines (ray start --address=HOST:6379), end "
                        "what holds them (ray status shows it), or lower --tensor-parallel-size, "
                        "--pipeline-parallel-size or --data-parallel-size."
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        return resource, group

    def own_node_for_engine(self, resource: str, parallel: ParallelConfig) -> str | None:
        """Return the machine for this engine, of those that can hold a complete one."""
        if parallel.data_parallel_size == 1:
            return None
        large = [
            node
            for node in self._nodes()
            if node["Resources"].get(resource, 0) >= parallel.world_size
        ]
        names = sorted(node["NodeID"] for node in large)
        return names[int(os.environ.get(ENGINE_VARIABLE, "0")) % len(names)] if names else None

    def leave(self) -> None:
        """Leave the cluster. Idempotent."""
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

    def _room_sentence(self, resource: str, wanted: int) -> str:
        """Return a sentence on the cluster's resources."""
        free = int(self.ray.available_resources().get(resource, 0))
        each = ", ".join(
            f"{node['NodeManagerAddress']} has {int(node['Resources'].get(resource, 0))}"
            for node in self._nodes()
        )
        needs = f"{wanted} {resource}{'s' if wanted > 1 else ''}"
        return (
            f"The engine needs {needs}, and the Ray cluster has {free} free of "
            f"{self._total(resource)} ({each})."
        )


def _import() -> ModuleType:
    # Ray would print ended processes to standard output, among answers. Our log has them.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise _config_error(
            "--distributed-executor-backend ray needs Ray on every machine: "
            "pip install '.[ray]' in tk's checkout."
        ) from None
    return ray


def _join(ray: ModuleType) -> None:
    """Join. Ray replaces the SIGTERM handler, which is restored."""
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
        raise _config_error(
            f"{what}. ray start --head starts one, ray start --address=HOST:6379 adds another "
            "machine; tk runs on one of them."
        ) from None
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _require_answer(address: str) -> None:
    """Raise ConfigError if nothing answers: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if address.startswith("ray://"):
        raise _config_error(
            f"RAY_ADDRESS is {address}: tk runs on a machine of the cluster; set HOST:6379, or "
            "nothing."
        )
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise _config_error(
            f"RAY_ADDRESS is {address}, and no Ray cluster answers there ({error})."
        ) from None


def _config_error(message: str) -> ConfigError:
    return ConfigError(message, param="distributed_executor_backend")
