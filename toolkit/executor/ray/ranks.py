"""Ranks on the machines of a Ray cluster. Ray starts them; messages do not pass through it.

tk joins a cluster and never starts one. No rank is in the engine's process. All messages, and the
log lines of actors, take the TCP channel that each actor opens to the engine (`tcp_channel`). An
actor ends with its channel. The placement group ends with the engine's process, which makes room
for its replacement."""

import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from toolkit.config import EngineConfig
from toolkit.errors import ConfigError, WorkersLostError
from toolkit.executor.channel import SocketChannel
from toolkit.executor.rank_messages import StartRank
from toolkit.executor.ranks import Rank, Ranks
from toolkit.executor.ray.actor import ActorPlace, RankActor
from toolkit.executor.ray.cluster import Cluster
from toolkit.executor.tcp_channel import TCPListener
from toolkit.logs import LogStyle

logger = logging.getLogger(__name__)

START = 120.0  # seconds for an actor to start: Python and PyTorch may come over a network
END_REASON_TIMEOUT = 0.7
"""Seconds for Ray to report how an actor ended: less than others wait for it."""


class Actors(Ranks):
    """All ranks, each an actor of one placement group."""

    def __init__(self, config: EngineConfig, folder: Path, log: LogStyle) -> None:
        """Raises ConfigError: no cluster, no room in it, machines that differ or lack the model."""
        self._cluster = Cluster()
        self._group: Any = None
        self._store: TCPStore | None = None
        self.others = []
        try:
            resource, self._group = self._cluster.place(config)
            self._start(config, folder, log, resource)
        except BaseException:
            for rank in self.others:
                rank.kill()
            self.close()
            raise

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._store = None  # stops listening
        self._cluster.leave()

    def _start(self, config: EngineConfig, folder: Path, log: LogStyle, resource: str) -> None:
        found = self._actors(config.parallel.world_size, str(folder), resource)
        found.sort(key=lambda one: order(one[1], self._cluster.own_node))
        places = [place for _, place in found]
        addresses = self._cluster.addresses()
        require_alike(places, addresses, folder)
        here = addresses[self._cluster.own_node]
        self.rendezvous = self._open_store(here)
        listener = TCPListener(here)
        try:
            actors = [
                RayRank(
                    self._cluster.ray,
                    rank,
                    actor,
                    addresses[place.node],
                    actor.run.remote(
                        addresses[place.node],
                        (here, listener.port, listener.key),
                        rank,
                        visible_gpus(place, places),
                    ),
                )
                for rank, (actor, place) in enumerate(found)
            ]
            self.others += actors

            def look() -> None:
                for actor in actors:
                    actor.require_alive()

            channels = listener.accept(range(len(actors)), START, look)
        except TimeoutError as error:
            raise ConfigError(
                f"A rank did not reach this machine at {here} in {START:g} s ({error}): is there "
                "a firewall between the machines?",
                param="distributed_executor_backend",
            ) from None
        finally:
            listener.close()
        engines = -(
            -config.parallel.data_parallel_size // len(addresses)
        )  # that may be on a machine
        on_node = {
            node: count * engines for node, count in Counter(place.node for place in places).items()
        }
        for actor, (_, place) in zip(actors, found, strict=True):
            threads = config.device.num_threads or max(1, place.cores // on_node[place.node])
            own = config.with_settings(
                device="cuda" if resource == "GPU" else "cpu", num_threads=threads
            )
            begin = StartRank(
                own, str(folder), self.rendezvous, actor.rank, log, on_node[place.node]
            )
            actor.begin(channels[actor.rank], begin)
        logger.info("Ray has placed %s", ", ".join(actor.name for actor in actors))

    def _actors(self, count: int, folder: str, resource: str) -> list[tuple[Any, ActorPlace]]:
        ray = self._cluster.ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        made = ray.remote(RankActor)
        actors = [
            made.options(
                num_cpus=int(resource == "CPU"),
                num_gpus=int(resource == "GPU"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            ).remote()
            for bundle in range(count)
        ]
        try:
            places = ray.get([actor.look.remote(folder) for actor in actors], timeout=START)
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"Ray could not start a rank ({_cause(error)}). Every machine needs the same "
                "Python and the same tk: pip install '.[ray]' in tk's checkout.",
                param="distributed_executor_backend",
            ) from None
        return list(zip(actors, places, strict=True))

    def _open_store(self, host: str) -> str:
        """Open the ranks' store, only at this machine's address in the cluster."""
        listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=START),
            False,
            master_listen_fd=listener.detach(),
        )
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def order(place: ActorPlace, own_node: str) -> tuple[bool, str]:
    """Sort key: ranks of one machine together, those of the engine's machine first."""
    return place.node != own_node, place.node


def visible_gpus(place: ActorPlace, places: Sequence[ActorPlace]) -> str:
    """Return the GPUs of all ranks on the machine.

    NCCL finds the links between them; a rank takes the one at its number modulo their count."""
    return ",".join(gpu for other in places if other.node == place.node for gpu in other.gpus)


def require_alike(places: Sequence[ActorPlace], addresses: Mapping[str, str], folder: Path) -> None:
    """Raise ConfigError if machines lack the model or have other versions.

    `addresses`: by node id."""
    lacking = sorted({addresses[place.node] for place in places if not place.has_model})
    if lacking:
        raise ConfigError(
            f"There is no model in {folder} on {', '.join(lacking)}: every machine reads it from "
            "the same path (a shared folder, or tk pull on each).",
            param="model",
        )
    if len({place.versions for place in places}) > 1:
        each = ", ".join(
            sorted({f"{addresses[place.node]} has {place.versions}" for place in places})
        )
        raise ConfigError(
            f"The machines' versions differ: {each}.", param="distributed_executor_backend"
        )


class RayRank(Rank):
    """An actor, and the channel to its process."""

    def __init__(self, ray: ModuleType, rank: int, actor: Any, address: str, running: Any) -> None:
        """`running`: its call, which returns when the process ends."""
        self.rank = rank
        self._ray, self._actor, self._address, self._running = ray, actor, address, running

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self._address}"

    def begin(self, channel: SocketChannel, begin: StartRank) -> None:
        self.channel = channel
        channel.send(begin)

    def require_alive(self) -> None:
        """Raise WorkersLostError if its process has ended."""
        if self._ray.wait([self._running], timeout=0)[0]:
            raise WorkersLostError(f"{self.name} ended before it began ({self.how_ended()})")

    def how_ended(self) -> str:
        ray = self._ray
        try:
            ray.get(self._running, timeout=END_REASON_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            return "the connection is lost"
        except ray.exceptions.RayError as error:
            return _cause(error)
        return "the actor was ended"

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def end(self, patience: float) -> None:
        self._ray.wait([self._running], timeout=patience)
        self.kill()
        self.channel.close()


def _cause(error: Exception) -> str:
    """Return the part of Ray's message that has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1] if lines else type(error).__name__
    return said.split("Worker exit detail: ")[-1].split(" Some common causes")[0].rstrip(".")
