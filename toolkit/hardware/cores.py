"""The processor's cores that this process may use, and the threads that an engine on a CPU runs on them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.hardware.cgroup import ROOT, cpu_quota

CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    package: int
    """The processor that it is part of."""
    node: int
    """The part of memory that is nearest."""
    cpus: tuple[int, ...]
    """Of its hardware threads those that this process may run on, by the system's numbers; empty where nobody tells them."""


@dataclass(frozen=True, slots=True)
class Cores:
    """What this process may use."""

    all: tuple[Core, ...]
    """Near ones together."""
    quota: float | None
    """Processor time that control groups grant, in cores; None: no limit."""

    @property
    def limited(self) -> bool:
        return self.quota is not None and self.quota < len(self.all)

    @property
    def uneven(self) -> bool:
        """Whether it matters where a thread runs: hardware threads share cores, or memory is near to some and far from others."""
        return (
            any(len(core.cpus) > 1 for core in self.all)
            or len({core.node for core in self.all}) > 1
        )


@dataclass(frozen=True, slots=True)
class Threads:
    """What one rank of an engine computes with."""

    count: int
    cores: tuple[Core, ...] = ()
    """What each is bound to: all hardware threads of one core. Empty: the system places them."""


def find_cores(root: Path = ROOT, allowed: set[int] | None = None) -> Cores:
    """`root`: where sys and proc are; `allowed`: numbers of hardware threads, by default the process' affinity."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = {_core(root, cpu, allowed) for cpu in allowed}
    if not cores:  # no Linux
        count = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        return Cores((Core(0, 0, ()),) * count, None)
    return Cores(
        tuple(sorted(cores, key=lambda core: (core.package, core.node, core.cpus))), cpu_quota(root)
    )


def num_cpus() -> int:
    """Hardware threads that this process may keep busy, as its affinity and its cgroup allow."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, int(min(count, cpu_quota() or count)))


def plan_threads(cores: Cores, asked: int | None = None, rank: int = 0, size: int = 1) -> Threads:
    """Of the `rank`-th of `size` ranks that share the cores out.

    A thread for each physical core: two on one core would share its multipliers. One rank stays on one processor, whose threads
    reach each other and its memory quickly; weights and cache lie where those threads first write them. Who asks for a number, or
    has less time than cores, gets threads that the system places. The server's own thread is bound nowhere, and finds the other
    hardware threads free.
    """
    if asked is not None:
        return Threads(asked)
    if cores.limited:
        assert cores.quota is not None
        return Threads(max(1, int(cores.quota) // size))
    if size == 1:
        # Cores of one memory node are together, whatever a virtual machine calls a processor.
        package: dict[int, int] = {}
        for core in cores.all:
            package[core.node] = min(package.get(core.node, core.package), core.package)
        places = [package[core.node] for core in cores.all]
        most = max(places, key=places.count)
        own = tuple(core for core, place in zip(cores.all, places, strict=True) if place == most)
    else:
        count = len(cores.all) // size
        own = cores.all[rank * count : (rank + 1) * count]
    return Threads(max(1, len(own)), own if cores.uneven else ())


def asked_for() -> int | None:
    """The number of threads in OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else None


def _core(root: Path, cpu: int, allowed: set[int]) -> Core:
    topology = root / CPUS / f"cpu{cpu}" / "topology"
    siblings = _numbers(topology / "thread_siblings_list") & allowed | {cpu}
    package = _numbers(topology / "physical_package_id") or {0}
    nodes = [int(path.name[4:]) for path in (root / CPUS / f"cpu{cpu}").glob("node[0-9]*")]
    return Core(min(package), min(nodes, default=0), tuple(sorted(siblings)))


def _numbers(path: Path) -> set[int]:
    """Of a list such as 0-3,8; empty where there is none."""
    try:
        parts = [part.partition("-") for part in path.read_text().strip().split(",")]
        return {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
