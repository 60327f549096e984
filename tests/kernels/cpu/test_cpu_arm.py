"""The portable kernels on an emulated ARM CPU, compared with this machine's kernels."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests import builds
from toolkit.kernels import cpu
from toolkit.kernels.cpu.library import PATH

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "kernels" / "cpu"
CROSS, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [tool for tool in (CROSS, EMULATOR, "g++") if shutil.which(tool) is None]

if MISSING or not cpu.available() or not sys.platform.startswith("linux"):
    pytest.skip(f"needs Linux, the CPU kernels and {', '.join(MISSING)}", allow_module_level=True)


def results(command: list[str]) -> dict[str, torch.Tensor]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ("portable" if EMULATOR in command else cpu.variants()[-1])
    lines = (line.split() for line in done.stdout.splitlines())
    return {name: torch.tensor([float(value) for value in values]) for name, *values in lines}


def test_arm_computes_the_same_numbers_as_this_machine(tmp_path):
    spec = importlib.util.spec_from_file_location("build", HERE.parents[1] / "setup.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    flags = [*build.FLAGS, *build.WARNINGS, "-Werror", "-DTK_VARIANT=portable"]

    def compile_all(folder: Path) -> None:
        def compiled(source: Path) -> str:
            target = str(folder / f"{source.stem}.o")
            subprocess.run([CROSS, "-c", *flags, str(source), "-o", target], check=True)
            return target

        with ThreadPoolExecutor(2) as threads:
            objects = list(threads.map(compiled, [*SOURCES.glob("*.cpp"), HERE / "portable.cpp"]))
        subprocess.run([CROSS, *objects, "-pthread", "-o", str(folder / "arm")], check=True)
        for name in objects:
            Path(name).unlink()

    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), HERE / "portable.cpp"]
    version = subprocess.run([CROSS, "--version"], capture_output=True, text=True).stdout
    arm = str(builds.build("arm", sources, (flags, version), compile_all) / "arm")
    here = str(tmp_path / "here")
    library = [str(PATH), f"-Wl,-rpath,{PATH.parent}", "-pthread"]
    subprocess.run(
        ["g++", "-std=c++17", str(HERE / "portable.cpp"), *library, "-o", here], check=True
    )

    expected, found = results([here]), results([EMULATOR, "-L", LIBRARIES, arm])
    assert found.keys() == expected.keys()
    assert len(found) == 4 * (4 + 3) + 4 * (4 + 4) + 3 + 4
    for name, numbers in expected.items():
        assert numbers.abs().max() > 0.01, name
        torch.testing.assert_close(
            found[name],
            numbers,
            rtol=1e-4,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
