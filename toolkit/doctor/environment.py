"""`tk collect-env`: facts for a bug report, in Markdown, without private data."""

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit.doctor.finding import Finding
from toolkit.doctor.installation import requirements, version_of
from toolkit.doctor.machine import driver_version
from toolkit.doctor.redact import redact, redact_variable
from toolkit.doctor.shipped import CHECKOUT
from toolkit.hardware.devices import find_device, find_gpus
from toolkit.units import size
from toolkit.version import __version__

VARIABLES = (
    "TK_", "TOOLKIT_", "HF_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_",
    "TRANSFORMERS_", "LD_",
)  # fmt: skip
"""Prefixes of environment variables that affect tk."""
OPTIONAL = ("triton", "flash-attn-4", "opentelemetry-sdk")

SettingRow = tuple[str, str, str, str]  # (command, setting, value, origin)


def markdown(
    facts: dict[str, Any], findings: Iterable[Finding], changed: Iterable[SettingRow]
) -> str:
    """Format the report.

    `facts`: of the probe. `findings`: those that did not pass are included. `changed`: settings
    that differ from their defaults."""
    problems = [
        (str(one.status), f"{one.name}: {redact(one.text)}")
        for one in findings
        if one.status != "pass"
    ]
    settings: dict[tuple[str, str], list[str]] = {}
    for command, name, value, origin in changed:
        settings.setdefault((name, f"`{redact(value)}` from {redact(origin)}"), []).append(command)
    parts: list[tuple[str, list[tuple[str, str]]]] = [
        ("System", list(_system())),
        ("Device", list(_device(facts))),
        ("Packages", list(_packages())),
        ("Settings", [(k, f"{v} ({', '.join(names)})") for (k, v), names in settings.items()]),
        ("Variables", list(_variables())),
        ("tk doctor", problems),
    ]
    return "\n\n".join(_table(title, rows) for title, rows in parts if rows)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = (f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows)
    return "\n".join([f"### {title}", "", "| | |", "|---|---|", *lines])


def _system() -> Iterator[tuple[str, str]]:
    yield "tk", f"{__version__}{_commit()}"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield (
        "OS",
        redact(f"{_distribution()}, {platform.system()} {platform.release()} {platform.machine()}"),
    )
    yield "CPU", f"{_cpu()}, {os.cpu_count()} cores"
    memory = find_device("cpu")
    yield "Memory", f"{size(memory.free)} free of {size(memory.total)}"


def _device(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    gpus = find_gpus()
    if version := driver_version():
        yield "Driver", version
    for number, gpu in enumerate(gpus):
        yield f"GPU {number}", f"{gpu.name}, {size(gpu.free)} free of {size(gpu.total)}"
    if not gpus:
        yield "GPU", "none"
    for name, value in facts.items():
        if value is not None:
            yield name.replace("_", " "), redact(str(value))


def _packages() -> Iterator[tuple[str, str]]:
    for name in (*(one.name for one in requirements()), *OPTIONAL):
        if version := version_of(name):
            yield name, version


def _variables() -> Iterator[tuple[str, str]]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            yield name, f"`{redact_variable(name, value)}`"


def _commit() -> str:
    """Return the commit of a checkout, and whether it was changed."""
    if not (CHECKOUT / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", CHECKOUT, "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f" (checkout at {done.stdout.strip()})" if done.returncode == 0 else ""


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.platform(terse=True)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
