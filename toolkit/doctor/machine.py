"""Checks of the machine: driver, PyTorch, kernels, compiler, memory, disk, limits."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.doctor.finding import Finding
from toolkit.hardware.cores import Cores, asked_for, find_cores, plan_threads
from toolkit.hardware.devices import Device, find_device, find_gpus
from toolkit.units import size

PYTHONS = ((3, 11), (3, 13))
GIB = 2**30
FEW_FILES = 4096
"""Fewer open files than this keep a server from its streams."""
NVIDIA = "0x10de"
"""Its number among makers of PCI devices."""


def check_machine() -> Iterator[Finding]:
    """All that takes no time."""
    gpus = find_gpus()
    yield _python()
    yield _driver(gpus)
    yield _compiler(gpus)
    yield _cores(find_cores(), asked_for())
    yield _memory()
    yield _disk()
    yield _temporary_files()
    yield _open_files()


def check_torch(facts: dict[str, Any]) -> Iterator[Finding]:
    """`facts`: what the probe found out."""
    gpus = find_gpus()
    yield _torch(facts, gpus)
    yield _kernels(facts, gpus)


def _python() -> Finding:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("python", "pass", text)
    known = " to ".join(".".join(map(str, version)) for version in PYTHONS)
    return Finding(
        "python", "fail", text, f"tk runs on Python {known}: make an environment with one of these."
    )


def _driver(gpus: list[Device]) -> Finding:
    if gpus:
        listed = ", ".join(
            f"{gpu.name} ({size(gpu.free)} free of {size(gpu.total)})" for gpu in gpus
        )
        return Finding("driver", "pass", f"NVIDIA {driver_version()}: {listed}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None and driver_version():
        return Finding(
            "driver",
            "warn",
            "CUDA_VISIBLE_DEVICES leaves no GPU, so tk runs on the CPU",
            "Unset it to use the GPU.",
        )
    if has_nvidia_card():
        fix = "Install NVIDIA's driver; in a container, start it with the GPUs (--gpus all)."
        return Finding(
            "driver", "fail", "there is an NVIDIA GPU, and no driver that answers for it", fix
        )
    return Finding("driver", "pass", "no NVIDIA GPU: tk runs on the CPU")


def driver_version() -> str:
    """Empty where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def has_nvidia_card() -> bool:
    """Whether one is on the PCI bus, driver or not."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            maker, kind = (
                (device / "vendor").read_text().strip(),
                (device / "class").read_text().strip(),
            )
        except OSError:
            continue
        if maker == NVIDIA and kind.startswith("0x03"):
            return True
    return False


def _torch(facts: dict[str, Any], gpus: list[Device]) -> Finding:
    if "error" in facts:
        fix = "Install it again: pip install --force-reinstall torch."
        return Finding("torch", "fail", f"PyTorch does not run: {facts['error']}", fix)
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU only"
    text = f"{facts['torch']} ({built})"
    if facts["product"]:
        return Finding(
            "torch",
            "fail",
            f"{text}: {facts['product']}",
            "Update the driver, or install torch again.",
        )
    if gpus and not facts["cuda"]:
        fix = "Install the build for CUDA: pip install torch, without an index for CPUs."
        return Finding("torch", "fail", f"{text}, and the machine has a GPU", fix)
    if gpus and not facts["available"]:
        fix = f"Update the driver ({driver_version()}), or install a torch for an older CUDA."
        return Finding("torch", "fail", f"{text} cannot use the GPU", fix)
    if facts["available"]:
        return Finding(
            "torch", "pass", f"{text} on {facts['gpu']}, compute capability {facts['capability']}"
        )
    packed = "packed products" if facts["mkldnn"] else "no oneDNN, so products are slow"
    return Finding(
        "torch",
        "pass",
        f"{text}, {facts['cpu_capability']}, {packed}, {facts['num_threads']} threads",
    )


def _kernels(facts: dict[str, Any], gpus: list[Device]) -> Finding:
    failed = facts.get("kernels", "PyTorch does not run")
    if not gpus and failed is None:
        return Finding("kernels", "pass", f"C++ for this CPU ({facts['variant']})")
    if not gpus:
        fix = "Install a C++ compiler, and tk again: PyTorch's operations serve without, and are slower."
        return Finding("kernels", "warn", failed, fix)
    if failed is None:
        return Finding("kernels", "pass", "a Triton kernel was compiled, and its numbers are right")
    return Finding(
        "kernels",
        "fail",
        failed,
        "Triton needs a C compiler and the package triton that came with torch.",
    )


def _compiler(gpus: list[Device]) -> Finding:
    names = (
        os.environ.get("CXX"),
        "c++",
        "g++",
        "clang++",
        os.environ.get("CC"),
        "cc",
        "gcc",
        "clang",
    )
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is not None:
        return Finding("compiler", "pass", found)
    fix = "Install one: apt-get install g++, dnf install gcc-c++, xcode-select --install."
    if gpus:
        return Finding("compiler", "fail", "no C or C++ compiler, which Triton needs", fix)
    return Finding(
        "compiler", "warn", "no C or C++ compiler: kernels for the CPU cannot be built", fix
    )


def _cores(cores: Cores, asked: int | None) -> Finding:
    """What an engine on the CPU computes with, and why."""
    plan = plan_threads(cores, asked)
    num_cpus, packages = (
        sum(len(core.cpus) for core in cores.all),
        {core.package for core in cores.all},
    )
    found = _counted(len(cores.all), "core")
    if num_cpus > len(cores.all):
        found += f" ({num_cpus} hardware threads)"
    if len(packages) > 1:
        found += f" of {len(packages)} processors"
    if cores.quota is not None:
        found += f", and a control group's limit of {cores.quota:g}"
    bound = ", all but the first bound to a core each" if len(plan.cores) > 1 else ""
    text = f"{found}: on the CPU tk computes with {_counted(plan.count, 'thread')}{bound}"
    if asked is not None:
        return Finding("cores", "pass", f"{text} (OMP_NUM_THREADS)")
    if cores.quota is not None and cores.quota < 1:
        return Finding(
            "cores",
            "warn",
            text,
            "Less than one core's time makes every answer stall: grant at least one.",
        )
    return Finding("cores", "pass", text)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _memory() -> Finding:
    device = find_device("cpu")
    text = f"{size(device.free)} free of {size(device.total)}"
    if device.free < 2 * GIB:
        return Finding(
            "memory", "warn", text, "Few models fit: end what you can, or take --dtype bfloat16."
        )
    return Finding("memory", "pass", text)


def _disk() -> Finding:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    text = f"{size(free)} free for models in {cache}"
    if not os.access(there, os.W_OK):
        return Finding(
            "disk",
            "fail",
            f"{there} cannot be written to",
            "HF_HOME names another place for models.",
        )
    if free < 10 * GIB:
        fix = "tk models lists what takes the room, tk rm removes it, and HF_HOME names another place."
        return Finding("disk", "warn" if free > GIB else "fail", text, fix)
    return Finding("disk", "pass", text)


def _temporary_files() -> Finding:
    """The engine's sockets are files in a folder for temporary ones."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Finding("sockets", "pass", f"in {Path(folder).parent}")
    except OSError as error:
        return Finding(
            "sockets",
            "fail",
            f"no place for the engine's sockets: {error}",
            "TMPDIR names another place.",
        )


def _open_files() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if most == resource.RLIM_INFINITY else f"up to {most:,}"
    if most != resource.RLIM_INFINITY and most < FEW_FILES:
        fix = "Every stream is an open file: raise the limit (ulimit -Hn, LimitNOFILE= in systemd)."
        return Finding("open files", "warn", text, fix)
    return Finding("open files", "pass", text)
