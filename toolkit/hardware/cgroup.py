"""What Linux's control groups (versions 1 and 2) leave this process: processor time and memory.

A limit of a group holds for those within it, so that all from the process' own group up to the root count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED = 2**62
"""Bytes; more than any machine has."""


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processor time in cores; None: as much as there is."""
    least = None
    for group in _groups("cpu", root):
        if (group / "cpu.max").is_file():
            words = _text(group / "cpu.max").split()
        else:
            words = [_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        try:
            quota, period = (int(word) for word in words)
        except ValueError:  # "max", or no such files
            continue
        if quota > 0 and period > 0:  # -1 is version 1's word for no limit
            least = min(quota / period, least or UNLIMITED)
    return least


def memory(root: Path = ROOT) -> tuple[int, int]:
    """(the limit, what it leaves, where files that the system has cached count as left); UNLIMITED without one."""
    limit = left = UNLIMITED
    for group in _groups("memory", root):
        old = (group / "memory.limit_in_bytes").is_file()
        names = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
        try:
            own, used = (int(_text(group / f"memory.{name}")) for name in names)
            statistics = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            prefix = "total_" if old else ""
            cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
        except (ValueError, KeyError):
            continue
        limit, left = min(limit, own), min(left, own - used + cached)
    return limit, max(0, left)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, from the innermost out."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 names none
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" and "" in paths:
            path = paths[""]
        elif kind == "cgroup" and controller in options.split(",") and controller in paths:
            path = paths[controller]
        else:
            continue
        top, point = mount.split()[3:5]
        folder = here = root / point.lstrip("/")
        inner = path.removeprefix("" if top == "/" else top).strip("/")
        if (
            here / inner
        ).is_dir():  # a container may see its own group as the root, and its path as the host has it
            folder = here / inner
        yield folder
        while folder != here:
            folder = folder.parent
            yield folder


def _text(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
