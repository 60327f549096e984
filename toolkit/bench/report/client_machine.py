"""Description of the client's machine."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def environment() -> dict[str, Any]:
    """Return versions, processor and load, but nothing that identifies the machine or its user."""
    from toolkit.version import __version__

    return {
        "tk": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str | None:
    """Return the processor's name, or None if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), None)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
