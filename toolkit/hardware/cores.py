"""CPU cores that this process may use, and the threads that an engine runs on them."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.hardware.cgroup import ROOT, cpu_quota

CPUS = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    package: int  # processor (socket) number
    node: int  # nearest memory node
    cpus: tuple[int, ...]
    """Numbers of the core's hardware threads that this process may use. Empty if unknown."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores and CPU time that this process may use."""

    all: tuple[Core, ...]  # cores, sorted by processor and memory node
    quota: float | None  # CPU time limit of the control groups, in cores. None: no limit

    @property
    def is_limited(self) -> bool:
        return self.quota is not None and self.quota < len(self.all)

    @property
    def is_uneven(self) -> bool:
        """True if it matters where a thread runs: SMT cores, or several memory nodes."""
        return (
            any(len(core.cpus) > 1 for core in self.all)
            or len({core.node for core in self.all}) > 1
        )


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Threads that one rank of an engine computes with."""

    count: int
    cores: tuple[Core, ...] = ()
    """Cores that the threads are bound to, one each. Empty: the system places them."""


def find_cores(root: Path = ROOT, allowed: set[int] | None = None) -> Cores:
    """Find the usable cores.

    `root`: folder with sys and proc. `allowed`: hardware threads; default: the CPU affinity."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = {_core(root, cpu, allowed) for cpu in allowed}
    if not cores:  # not Linux
        count = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        return Cores((Core(0, 0, ()),) * count, None)
    return Cores(
        tuple(sorted(cores, key=lambda core: (core.package, core.node, core.cpus))), cpu_quota(root)
    )


def num_cpus() -> int:
    """Return the number of hardware threads that CPU affinity and control groups allow."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, int(min(count, cpu_quota() or count)))


def plan_threads(
    cores: Cores, requested: int | None = None, rank: int = 0, size: int = 1
) -> ThreadPlan:
    """Plan the threads of rank `rank` of `size` ranks that divide the cores.

    One thread per physical core: two on one core would share its multipliers. A single rank stays
    on one processor, where threads reach each other and its memory quickly; weights and cache lie
    where these threads first write them. With a requested number, or with less CPU time than
    cores, the system places the threads. The server's own thread is never bound; it finds the
    other hardware threads free."""
    if requested is not None:
        return ThreadPlan(requested)
    if cores.is_limited:
        assert cores.quota is not None
        return ThreadPlan(max(1, int(cores.quota) // size))
    if size == 1:
        # Cores of one memory node belong together; a virtual machine may call each a processor.
        package: dict[int, int] = {}
        for core in cores.all:
            package[core.node] = min(package.get(core.node, core.package), core.package)
        packages = [package[core.node] for core in cores.all]
        largest = max(packages, key=packages.count)
        own = tuple(core for core, p in zip(cores.all, packages, strict=True) if p == largest)
    else:
        count = len(cores.all) // size
        own = cores.all[rank * count : (rank + 1) * count]
    return ThreadPlan(max(1, len(own)), own if cores.is_uneven else ())


def requested_threads() -> int | None:
    """Return the number of threads in OMP_NUM_THREADS, or None."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _core(root: Path, cpu: int, allowed: set[int]) -> Core:
    topology = root / CPUS / f"cpu{cpu}" / "topology"
    siblings = _numbers(topology / "thread_siblings_list") & allowed | {cpu}
    package = _numbers(topology / "physical_package_id") or {0}
    nodes = [int(path.name[4:]) for path in (root / CPUS / f"cpu{cpu}").glob("node[0-9]*")]
    return Core(min(package), min(nodes, default=0), tuple(sorted(siblings)))


def _numbers(path: Path) -> set[int]:
    """Read a list such as 0-3,8. Empty if there is no such file."""
    try:
        parts = [part.partition("-") for part in path.read_text().strip().split(",")]
        return {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
