"""Memory of the host."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import psutil
from toolkit.worker.memory import give_back
process = psutil.Process()
bytearray(30 * 2**20)  # from then on blocks up to this size are of the heap
blocks = [bytearray(8 * 2**20) for _ in range(20)]
last = bytearray(2**20)  # behind them, so that the heap's end stays where it is
blocks.clear()
held = process.memory_info().rss
give_back()
print((held - process.memory_info().rss) // 2**20)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing, or have no way to say so"
)
def test_what_was_freed_is_given_back():
    """20 blocks of 8 MiB."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 100
