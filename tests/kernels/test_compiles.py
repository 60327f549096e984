"""Kernels compile for a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(name: str, cache: Path) -> str:
    """What a script of this folder prints, with an empty cache of compiled kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_compile_for_hopper(tmp_path):
    """What the interpreter runs the compiler may refuse, as a variable that changes its shape."""
    assert len(run("compiled.py", tmp_path).splitlines()) == 9


def test_compiled_side_by_side(tmp_path):
    """Launches become compilations, once for each kernel and on other threads; what does not compile raises where it is launched."""
    run("compiled_ahead.py", tmp_path)
