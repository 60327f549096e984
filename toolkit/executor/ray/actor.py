"""A rank in an actor of Ray: what runs on the machine that Ray has chosen."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.executor.rank import RankProcess
from toolkit.executor.tcp_channel import call
from toolkit.hardware.cores import find_cores
from toolkit.hardware.parent import wake_with_parent
from toolkit.version import __version__


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node: str
    """Ray's name of the machine."""
    gpus: tuple[str, ...]
    """Those that are the actor's."""
    cores: int
    """Processor cores that may be used there."""
    versions: str
    has_model: bool


class RankActor:
    def look(self, folder: str) -> Place:
        """`folder`: the model's."""
        import ray

        context = ray.get_runtime_context()
        cores = find_cores()
        return Place(
            node=context.get_node_id(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
            cores=max(1, int(min(len(cores.all), cores.quota or len(cores.all)))),
            versions=f"tk {__version__} with torch {importlib.metadata.version('torch')}",
            has_model=(Path(folder) / "config.json").exists(),
        )

    def run(self, here: str, door: tuple[str, int, bytes], rank: int, gpus: str) -> None:
        """Is a rank, until it is told to end. `here`: this machine's address in the cluster; `gpus`: those of all ranks here, so that NCCL
        finds the ways between them.
        """
        wake_with_parent()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        interface = _interface(here)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        channel = call(*door, rank)
        if RankProcess(channel, far=True).run():
            return  # Ray ends this process when asked, without a complaint
        channel.finish()
        os._exit(1)  # what is left of the group of ranks may wait for others that are gone


def _interface(address: str) -> str:
    """The network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    raise RuntimeError(
        f"no network interface of this machine has the address {address} that Ray knows it by"
    )
