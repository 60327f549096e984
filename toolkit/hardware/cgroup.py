"""CPU time and memory that Linux control groups (versions 1 and 2) allow this process.

A group's limit applies to all groups inside it, so every group from this process's own up to the
root counts."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED = 2**62  # bytes; more than any machine has


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU time limit in cores, or None if there is none."""
    lowest = None
    for group in _groups("cpu", root):
        if (group / "cpu.max").is_file():
            words = _text(group / "cpu.max").split()
        else:
            words = [_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        try:
            quota, period = (int(word) for word in words)
        except ValueError:  # "max", or no such files
            continue
        if quota > 0 and period > 0:  # in version 1, -1 means no limit
            lowest = min(quota / period, lowest or UNLIMITED)
    return lowest


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Return (limit, bytes left) or UNLIMITED. The page cache counts as left: it can be dropped."""
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
    """Yield the folders of this process's groups, innermost first."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 lists no controllers
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
        # A container may see its own group as the root, but its path as on the host.
        if (here / inner).is_dir():
            folder = here / inner
        yield folder
        while folder != here:
            folder = folder.parent
            yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
