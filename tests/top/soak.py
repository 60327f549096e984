"""Run `tk top` in a pseudoterminal and report its CPU time and memory.

    python -m tests.top.soak --seconds 600 -- --demo
    python -m tests.top.soak --seconds 600 -- 127.0.0.1:8000

The exit code is 1 if, after the first minute (or tenth of a shorter run), memory grew by more than
5 MiB or the CPU time exceeded 5% of a core.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

import psutil

MAX_GROWTH = 5 * 2**20  # bytes
MAX_CORE = 0.05
MAX_SECONDS = 600.0


def drain(terminal, until):
    """Read the output, like a terminal, until the time `until`."""
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], min(left, 1.0))[0]:
            try:
                if not os.read(terminal, 1 << 16):
                    return
            except OSError:  # the process ended
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS)
    parser.add_argument("--size", default="80x24")
    parser.add_argument("--keys", default="", help="keys to press after the start")
    parser.add_argument("arguments", nargs="*", help="arguments of tk top")
    given = parser.parse_args()
    seconds = min(given.seconds, MAX_SECONDS)
    columns, lines = map(int, given.size.split("x"))
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.execvp(
            sys.executable,
            [sys.executable, "-c", "from toolkit.cli import main; main()", "top", *given.arguments],
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = psutil.Process(child)
    started = time.monotonic()
    drain(terminal, started + 5.0)
    os.write(terminal, given.keys.encode())
    warm_up = min(60.0, max(10.0, seconds / 10))
    drain(terminal, started + warm_up)

    def used():
        times = process.cpu_times()
        return times.user + times.system

    cpu, memory, since = used(), process.memory_info().rss, time.monotonic()
    peak = memory
    for minute in range(1, 100):
        until = min(started + seconds, since + 60.0 * minute)
        drain(terminal, until)
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            print("tk top ended by itself")
            return 1
        now, share = process.memory_info().rss, (used() - cpu) / (time.monotonic() - since)
        peak = max(peak, now)
        print(
            f"{time.monotonic() - started:5.0f} s  {now / 2**20:6.1f} MiB  {share:.2%} of a core",
            flush=True,
        )
        if until >= started + seconds:
            break
    os.write(terminal, b"q")
    drain(terminal, time.monotonic() + 2.0)
    process.terminate()
    os.waitpid(child, 0)
    growth = peak - memory
    print(f"memory grew by {growth / 2**20:.1f} MiB after {warm_up:.0f} s; {share:.2%} of a core")
    return 0 if growth <= MAX_GROWTH and share <= MAX_CORE else 1


if __name__ == "__main__":
    sys.exit(main())
