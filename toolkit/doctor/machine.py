"""Checks of the machine: driver, PyTorch, kernels, compiler, memory, disk, limits."""

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.doctor.finding import Finding
from toolkit.hardware.cores import Cores, find_cores, plan_threads, requested_threads
from toolkit.hardware.devices import Device, find_device, find_gpus
from toolkit.units import GIB, size

PYTHONS = ((3, 11), (3, 13))
MIN_OPEN_FILES = 4096  # each stream needs one
NVIDIA = "0x10de"  # PCI vendor id


def check_machine() -> Iterator[Finding]:
    """Run the quick checks."""
    gpus = find_gpus()
    yield _python()
    yield _driver(gpus)
    yield _compiler(gpus)
    yield _cores(find_cores(), requested_threads())
    yield _memory()
    yield _disk()
    yield _temporary_files()
    yield _open_files()


def check_torch(facts: dict[str, Any]) -> Iterator[Finding]:
    """Evaluate the probe's facts."""
    gpus = find_gpus()
    yield _torch(facts, gpus)
    yield _kernels(facts, gpus)


def _python() -> Finding:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("python", "pass", text)
    known = " to ".join(".".join(map(str, version)) for version in PYTHONS)
    fix = f"tk needs Python {known}: create an environment with one of these."
    return Finding("python", "fail", text, fix)


def _driver(gpus: list[Device]) -> Finding:
    if gpus:
        listed = ", ".join(
            f"{gpu.name} ({size(gpu.free)} free of {size(gpu.total)})" for gpu in gpus
        )
        return Finding("driver", "pass", f"NVIDIA {driver_version()}: {listed}")
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None and driver_version():
        text = "CUDA_VISIBLE_DEVICES hides all GPUs, so tk runs on the CPU"
        return Finding("driver", "warn", text, "Unset it to use the GPU.")
    if has_nvidia_gpu():
        fix = "Install NVIDIA's driver. In a container, start it with the GPUs (--gpus all)."
        return Finding("driver", "fail", "there is an NVIDIA GPU, but no working driver", fix)
    return Finding("driver", "pass", "no NVIDIA GPU: tk runs on the CPU")


def driver_version() -> str:
    """Return the version of NVIDIA's driver, empty if there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def has_nvidia_gpu() -> bool:
    """Return whether an NVIDIA GPU is on the PCI bus, even without a driver."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith("0x03"):
            return True
    return False


def _torch(facts: dict[str, Any], gpus: list[Device]) -> Finding:
    if "error" in facts:
        fix = "Reinstall it: pip install --force-reinstall torch."
        return Finding("torch", "fail", f"PyTorch does not run: {facts['error']}", fix)
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU only"
    text = f"{facts['torch']} ({built})"
    if facts["product"]:
        fix = "Update the driver, or reinstall torch."
        return Finding("torch", "fail", f"{text}: {facts['product']}", fix)
    if gpus and not facts["cuda"]:
        fix = "Install the CUDA build: pip install torch, without a CPU-only index."
        return Finding("torch", "fail", f"{text}, but the machine has a GPU", fix)
    if gpus and not facts["available"]:
        fix = f"Update the driver ({driver_version()}), or install a torch for an older CUDA."
        return Finding("torch", "fail", f"{text} cannot use the GPU", fix)
    if facts["available"]:
        text = f"{text} on {facts['gpu']}, compute capability {facts['capability']}"
        return Finding("torch", "pass", text)
    onednn = "oneDNN" if facts["mkldnn"] else "no oneDNN, so matrix products are slow"
    text = f"{text}, {facts['cpu_capability']}, {onednn}, {facts['num_threads']} threads"
    return Finding("torch", "pass", text)


def _kernels(facts: dict[str, Any], gpus: list[Device]) -> Finding:
    failed = facts.get("kernels", "PyTorch does not run")
    if not gpus and failed is None:
        return Finding("kernels", "pass", f"C++ for this CPU ({facts['variant']})")
    if not gpus:
        fix = (
            "Install a C++ compiler, then reinstall tk. Without the kernels tk uses PyTorch's "
            "operations, which are slower."
        )
        return Finding("kernels", "warn", failed, fix)
    if failed is None:
        return Finding("kernels", "pass", "a Triton kernel compiles and is correct")
    fix = "Triton needs a C compiler and torch's version of the package triton."
    return Finding("kernels", "fail", failed, fix)


def _compiler(gpus: list[Device]) -> Finding:
    cxx, cc = os.environ.get("CXX"), os.environ.get("CC")
    names = (cxx, "c++", "g++", "clang++", cc, "cc", "gcc", "clang")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is not None:
        return Finding("compiler", "pass", found)
    fix = "Install one: apt-get install g++, dnf install gcc-c++, xcode-select --install."
    if gpus:
        return Finding("compiler", "fail", "no C or C++ compiler, which Triton needs", fix)
    return Finding("compiler", "warn", "no C or C++ compiler: the CPU kernels cannot be built", fix)


def _cores(cores: Cores, requested: int | None) -> Finding:
    """Describe the cores, and the threads that an engine on the CPU uses."""
    plan = plan_threads(cores, requested)
    num_cpus = sum(len(core.cpus) for core in cores.all)
    packages = {core.package for core in cores.all}
    found = _plural(len(cores.all), "core")
    if num_cpus > len(cores.all):
        found += f" ({num_cpus} hardware threads)"
    if len(packages) > 1:
        found += f" on {len(packages)} processors"
    if cores.quota is not None:
        found += f", and a control group's limit of {cores.quota:g}"
    bound = ", all but the first bound to a core each" if len(plan.cores) > 1 else ""
    text = f"{found}: on the CPU tk computes with {_plural(plan.count, 'thread')}{bound}"
    if requested is not None:
        return Finding("cores", "pass", f"{text} (OMP_NUM_THREADS)")
    if cores.quota is not None and cores.quota < 1:
        fix = "With less than one core's time every answer stalls: allow at least one core."
        return Finding("cores", "warn", text, fix)
    return Finding("cores", "pass", text)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _memory() -> Finding:
    device = find_device("cpu")
    text = f"{size(device.free)} free of {size(device.total)}"
    if device.free < 2 * GIB:
        fix = "Few models fit: stop other programs, or use --dtype bfloat16."
        return Finding("memory", "warn", text, fix)
    return Finding("memory", "pass", text)


def _disk() -> Finding:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    text = f"{size(free)} free for models in {cache}"
    if not os.access(existing, os.W_OK):
        fix = "Set HF_HOME to store models elsewhere."
        return Finding("disk", "fail", f"{existing} is not writable", fix)
    if free < 10 * GIB:
        fix = "List models with tk models, remove some with tk rm, or set HF_HOME to another disk."
        return Finding("disk", "warn" if free > GIB else "fail", text, fix)
    return Finding("disk", "pass", text)


def _temporary_files() -> Finding:
    """Check the folder for temporary files: the engine's sockets are there."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Finding("sockets", "pass", f"in {Path(folder).parent}")
    except OSError as error:
        text = f"no folder for the engine's sockets: {error}"
        return Finding("sockets", "fail", text, "Set TMPDIR to a writable folder.")


def _open_files() -> Finding:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if limit == resource.RLIM_INFINITY else f"up to {limit:,}"
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        fix = "Every stream is an open file: raise the limit (ulimit -Hn, LimitNOFILE= in systemd)."
        return Finding("open files", "warn", text, fix)
    return Finding("open files", "pass", text)
