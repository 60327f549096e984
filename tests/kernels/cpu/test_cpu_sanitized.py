"""The CPU kernels' tests, with AddressSanitizer and UndefinedBehaviorSanitizer.

Each of PyTorch's tensors has its own allocation, so reads and writes beyond one are detected.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from toolkit.kernels import cpu

ROOT = Path(__file__).parents[3]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O0", "-g1"]

if not cpu.available() or shutil.which("g++") is None or not sys.platform.startswith("linux"):
    pytest.skip("needs Linux, g++ and the CPU kernels", allow_module_level=True)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a Python with sanitized kernels, in this machine's best variant."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "setup.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    folder, variant = tmp_path_factory.mktemp("sanitized"), cpu.variants()[-1]
    flags = [
        *build.FLAGS,
        *build.WARNINGS,
        *SANITIZERS,
        *build.VARIANTS[variant],
        f"-DTK_VARIANT={variant}",
    ]

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run(["g++", "-c", *flags, str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compiled, sorted((ROOT / "kernels" / "cpu").glob("*.cpp"))))
    library = folder / "_kernels.so"
    subprocess.run(
        ["g++", "-shared", *SANITIZERS, "-pthread", *objects, "-o", str(library)], check=True
    )
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return os.environ | {
        "SANITIZED_KERNELS": str(library),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "OMP_NUM_THREADS": "1",
    }


def python(sanitized: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=sanitized, capture_output=True, text=True
    )


def test_kernels_stay_within_their_arrays(sanitized):
    tests = sorted(
        str(path) for path in Path(__file__).parent.glob("test_cpu_*.py") if path != Path(__file__)
    )
    done = python(
        sanitized,
        "-m",
        "pytest",
        "-x",
        "-p",
        "tests.kernels.cpu.sanitized",
        "-k",
        cpu.variants()[-1],
        *tests,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_writes_past_the_end_are_detected(sanitized):
    code = """
import tests.kernels.cpu.sanitized, torch
from toolkit.kernels.cpu import linear
packed = linear.PackedLinear(torch.ones(40, 8))
indices, too_short = torch.zeros(9, dtype=torch.int64), torch.empty(8, 8)
linear._rows.run(packed.address, indices.data_ptr(), 9, too_short.data_ptr(), 0)
"""
    done = python(sanitized, "-c", code)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
