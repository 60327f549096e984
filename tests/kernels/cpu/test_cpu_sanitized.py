"""The CPU kernels' tests, with AddressSanitizer and UndefinedBehaviorSanitizer.

Each of PyTorch's tensors has its own allocation, so reads and writes beyond one are detected.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import builds
from toolkit.kernels import cpu

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "kernels" / "cpu"
# AddressSanitizer finds what these three find, and they take a fifth of the time to compile.
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=undefined",
    "-O0",
    "-g1",
]

if not cpu.available() or shutil.which("g++") is None or not sys.platform.startswith("linux"):
    pytest.skip("needs Linux, g++ and the CPU kernels", allow_module_level=True)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def sanitized() -> dict[str, str]:
    """Return the environment of a Python with sanitized kernels, in this machine's best variant."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "setup.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    variant = cpu.variants()[-1]
    flags = [
        *build.FLAGS,
        *build.WARNINGS,
        *SANITIZERS,
        *build.VARIANTS[variant],
        f"-DTK_VARIANT={variant}",
    ]

    def compile_all(folder: Path) -> None:
        def compiled(source: Path) -> str:
            target = str(folder / f"{source.stem}.o")
            subprocess.run(["g++", "-c", *flags, str(source), "-o", target], check=True)
            return target

        with ThreadPoolExecutor(2) as threads:
            objects = list(threads.map(compiled, sorted(SOURCES.glob("*.cpp"))))
        linked = ["-shared", *SANITIZERS, "-pthread", *objects, "-o", str(folder / "_kernels.so")]
        subprocess.run(["g++", *linked], check=True)
        for name in objects:
            Path(name).unlink()

    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]
    folder = builds.build("sanitized", sources, (flags, output("g++", "--version")), compile_all)
    runtimes = [output("g++", f"-print-file-name={name}") for name in ("libasan.so", "libubsan.so")]
    return os.environ | {
        "SANITIZED_KERNELS": str(folder / "_kernels.so"),
        "SANITIZED_VARIANT": variant,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "OMP_NUM_THREADS": "1",
    }


def test_kernels_stay_within_their_arrays(sanitized):
    """The first of the tests shows that writes past the end are detected."""
    here = Path(__file__)
    tests = sorted(str(path) for path in here.parent.glob("test_cpu_*.py") if path != here)
    plugins = ("-p", "tests.kernels.cpu.sanitized", "-p", "no:xdist")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-v",
            *plugins,
            here.with_name("overflow.py"),
            *tests,
        ],
        cwd=ROOT,
        env=sanitized,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert re.search(
        r"test_writes_past_the_end_are_detected\s.*PASSED|overflow\.py \.", done.stdout
    )
