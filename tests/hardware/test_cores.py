"""CPU cores and CPU time of a process, on machines simulated by Linux's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.hardware import cgroup
from toolkit.hardware.cores import Core, find_cores, num_cpus, plan_threads
from toolkit.kernels import cpu

V2 = "0::{group}\n"
V2_MOUNT = "31 24 0:27 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "9:name=systemd:/\n5:cpu,cpuacct:{group}\n4:memory:{group}\n"
V1_MOUNTS = (
    "40 32 0:30 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "41 32 0:31 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, layout: list[tuple[int, int, int]]) -> Path:
    """Write a machine's files. `layout`: (processor, memory node, core) of each hardware thread."""
    for number, (package, node, _) in enumerate(layout):
        folder = root / "sys/devices/system/cpu" / f"cpu{number}"
        siblings = [str(other) for other, place in enumerate(layout) if place == layout[number]]
        write(folder / "topology/thread_siblings_list", ",".join(siblings) + "\n")
        write(folder / "topology/physical_package_id", f"{package}\n")
        (folder / f"node{node}").mkdir()
    return root


def v2(root: Path, group: str, limits: dict[str, str], top: str = "/") -> Path:
    """Write control groups of version 2. `limits`: cpu.max by folder."""
    write(root / "proc/self/cgroup", V2.format(group=group))
    write(root / "proc/self/mountinfo", V2_MOUNT.format(top=top))
    for folder, text in limits.items():
        write(root / "sys/fs/cgroup" / folder / "cpu.max", text)
    return root


def v1(root: Path, group: str, limits: dict[str, tuple[int, int]]) -> Path:
    """Write control groups of version 1. `limits`: (quota, period) by folder."""
    write(root / "proc/self/cgroup", V1.format(group=group))
    write(root / "proc/self/mountinfo", V1_MOUNTS.format(top="/"))
    for folder, (quota, period) in limits.items():
        write(root / "sys/fs/cgroup/cpu,cpuacct" / folder / "cpu.cfs_quota_us", f"{quota}\n")
        write(root / "sys/fs/cgroup/cpu,cpuacct" / folder / "cpu.cfs_period_us", f"{period}\n")
    return root


FLAT = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)]
HYPERTHREADED = [(0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 1)]
TWO_PROCESSORS = [
    (0, 0, 0),
    (1, 1, 10),
    (0, 0, 1),
    (1, 1, 11),
    (0, 0, 0),
    (1, 1, 10),
    (0, 0, 1),
    (1, 1, 11),
]
VIRTUAL = [(number, 0, 0) for number in range(8)]
"""Some virtual machines report each core as a processor."""


class TestCores:
    def test_equal_cores_get_one_unbound_thread_each(self, tmp_path):
        plan = plan_threads(find_cores(machine(tmp_path, FLAT), {0, 1, 2, 3}))
        assert (plan.count, plan.cores) == (4, ())

    def test_smt_core_gets_one_thread_bound_to_both_hardware_threads(self, tmp_path):
        plan = plan_threads(find_cores(machine(tmp_path, HYPERTHREADED), {0, 1, 2, 3}))
        assert plan.count == 2
        assert plan.cores == (Core(0, 0, (0, 2)), Core(0, 0, (1, 3)))

    def test_threads_respect_the_affinity(self, tmp_path):
        """taskset -c 1,3: both belong to the second core."""
        plan = plan_threads(find_cores(machine(tmp_path, HYPERTHREADED), {1, 3}))
        assert plan.cores == (Core(0, 0, (1, 3)),)
        assert plan_threads(find_cores(tmp_path, {0, 3})).cores == ()  # one thread of each core

    def test_one_rank_uses_one_processor_and_two_ranks_one_each(self, tmp_path):
        cores = find_cores(machine(tmp_path, TWO_PROCESSORS), set(range(8)))
        first, second = (
            (Core(0, 0, (0, 4)), Core(0, 0, (2, 6))),
            (Core(1, 1, (1, 5)), Core(1, 1, (3, 7))),
        )
        assert plan_threads(cores).cores == first
        assert [plan_threads(cores, rank=rank, size=2).cores for rank in (0, 1)] == [first, second]

    def test_processor_with_most_usable_cores_is_chosen(self, tmp_path):
        cores = find_cores(machine(tmp_path, TWO_PROCESSORS), {0, 1, 3})
        assert [core.cpus for core in plan_threads(cores).cores] == [(1,), (3,)]

    def test_cores_of_one_memory_node_count_as_one_processor(self, tmp_path):
        cores = find_cores(machine(tmp_path, VIRTUAL), set(range(8)))
        assert plan_threads(cores).count == 8

    def test_more_ranks_than_cores_get_one_thread_each(self, tmp_path):
        cores = find_cores(machine(tmp_path, FLAT), {0, 1})
        assert [plan_threads(cores, rank=rank, size=3).count for rank in range(3)] == [1, 1, 1]

    @pytest.mark.parametrize(
        ("quota", "count"), [("400000 100000", 2), ("150000 100000", 1), ("50000 100000", 1)]
    )
    def test_quota_below_cores_means_fewer_threads_without_binding(self, tmp_path, quota, count):
        v2(machine(tmp_path, HYPERTHREADED), "/", {"": quota})
        plan = plan_threads(find_cores(tmp_path, {0, 1, 2, 3}))
        assert (plan.count, bool(plan.cores)) == (count, quota.startswith("4"))

    def test_requested_number_of_threads_is_used(self, tmp_path):
        cores = find_cores(machine(tmp_path, TWO_PROCESSORS), set(range(8)))
        plan = plan_threads(cores, requested=7)
        assert (plan.count, plan.cores) == (7, ())


class TestControlGroups:
    def test_version_2_with_the_own_group_as_root(self, tmp_path):
        assert cgroup.cpu_quota(v2(tmp_path, "/", {"": "350000 100000\n"})) == 3.5

    def test_version_2_without_a_limit(self, tmp_path):
        assert cgroup.cpu_quota(v2(tmp_path, "/", {"": "max 100000\n"})) is None

    def test_lowest_limit_of_the_group_and_its_parents_counts(self, tmp_path):
        limits = {
            "a": "200000 100000",
            "a/b": "max 100000",
            "a/b/c": "800000 100000",
            "other": "1000 100000",
        }
        assert cgroup.cpu_quota(v2(tmp_path, "/a/b/c", limits)) == 2.0

    def test_container_with_the_hosts_path_and_only_its_own_folder(self, tmp_path):
        v2(tmp_path, "/docker/abc", {"": "100000 100000"}, top="/docker/abc")
        assert cgroup.cpu_quota(tmp_path) == 1.0
        v2(tmp_path, "/docker/abc", {"": "300000 100000"})
        assert cgroup.cpu_quota(tmp_path) == 3.0

    def test_version_1(self, tmp_path):
        limits = {"": (-1, 100000), "slice": (250000, 100000), "slice/tk": (-1, 100000)}
        assert cgroup.cpu_quota(v1(tmp_path, "/slice/tk", limits)) == 2.5
        assert cgroup.cpu_quota(v1(tmp_path, "/other", limits)) is None

    def test_memory_counts_the_page_cache_as_left(self, tmp_path):
        old, new = v1(tmp_path / "old", "/tk", {}), v2(tmp_path / "new", "/", {})
        files = old / "sys/fs/cgroup/memory/tk", new / "sys/fs/cgroup"
        for folder, limit, used, prefix in zip(
            files,
            ("limit_in_bytes", "max"),
            ("usage_in_bytes", "current"),
            ("total_", ""),
            strict=True,
        ):
            write(folder / f"memory.{limit}", "1000\n")
            write(folder / f"memory.{used}", "700\n")
            write(
                folder / "memory.stat",
                f"anon 1\n{prefix}inactive_file 80\n{prefix}active_file 20\n",
            )
        assert cgroup.memory(old) == cgroup.memory(new) == (1000, 400)

    def test_without_control_groups_there_is_no_limit(self, tmp_path):
        assert cgroup.cpu_quota(tmp_path) is None
        assert cgroup.memory(tmp_path) == (cgroup.UNLIMITED, cgroup.UNLIMITED)

    def test_limit_of_a_real_group_is_found(self):
        """With version 1, if this process may create a group."""
        group = Path("/sys/fs/cgroup/cpu") / f"tk-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cpu.cfs_quota_us").write_text("150000")
        except OSError as error:
            pytest.skip(f"cannot create a control group here: {error}")
        try:
            code = (
                "from toolkit.hardware.cores import *; c = find_cores(); "
                "print(c.quota, plan_threads(c).count)"
            )
            enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"
            done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, check=True)
            assert done.stdout.split() == ["1.5", "1"]
        finally:
            group.rmdir()


@pytest.mark.skipif(
    not cpu.available() or sys.platform != "linux", reason="the kernels' threads, on Linux"
)
def test_kernel_threads_are_bound_and_the_caller_is_not():
    """In a separate process, since bound threads stay bound."""
    code = """
import os
from toolkit.kernels import cpu
cpu.set_num_threads(3)
last = max(os.sched_getaffinity(0))
before = os.sched_getaffinity(0)
tasks = lambda: {int(task) for task in os.listdir("/proc/self/task")}
assert cpu.bind_threads([(0,), (last,), (last,)])
bound = [task for task in tasks() if os.sched_getaffinity(task) == {last}]
assert len(bound) >= 2 and os.sched_getaffinity(0) == before, bound
assert not cpu.bind_threads([(0,), (100_000,)])  # no such CPU
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (2.5, 2), (0.3, 1), (64.0, 6)])
def test_num_cpus_is_limited_by_affinity_and_quota(monkeypatch, quota, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr("toolkit.hardware.cores.cpu_quota", lambda: quota)
    assert num_cpus() == expected
