"""A rank in a Ray actor, on the machine that Ray has chosen."""

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.executor.rank import RankProcess
from toolkit.executor.tcp_channel import call
from toolkit.hardware.cores import find_cores
from toolkit.hardware.parent import resume_with_parent
from toolkit.version import __version__


@dataclass(frozen=True)
class ActorPlace:
    """The machine of an actor."""

    node: str  # Ray's id of the machine
    gpus: tuple[str, ...]  # ids of the actor's GPUs
    cores: int  # CPU cores that may be used
    versions: str
    has_model: bool


class RankActor:
    def look(self, folder: str) -> ActorPlace:
        """Describe this machine. `folder`: the model's."""
        import ray

        context = ray.get_runtime_context()
        cores = find_cores()
        return ActorPlace(
            node=context.get_node_id(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
            cores=max(1, int(min(len(cores.all), cores.quota or len(cores.all)))),
            versions=f"tk {__version__} with torch {importlib.metadata.version('torch')}",
            has_model=(Path(folder) / "config.json").exists(),
        )

    def run(self, here: str, listener: tuple[str, int, bytes], rank: int, gpus: str) -> None:
        """Run a rank until it ends.

        `here`: this machine's address in the cluster. `gpus`: GPUs of all ranks on this machine, so
        that NCCL finds the links between them."""
        resume_with_parent()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        interface = _interface(here)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        channel = call(*listener, rank)
        if RankProcess(channel, far=True).run():
            return  # Ray ends this process on request
        channel.finish()
        os._exit(1)  # the rest of the process group may wait for lost ranks


def _interface(address: str) -> str:
    """Return the network interface with an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    raise RuntimeError(
        f"no network interface of this machine has the address {address} that Ray knows it by"
    )
