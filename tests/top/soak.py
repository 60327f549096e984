"""Leaves `tk top` running on a terminal of its own, and says what it took of processor and memory.

    python -m tests.top.soak --seconds 600 -- --demo
    python -m tests.top.soak --seconds 600 -- 127.0.0.1:8000

Ends with 1 when memory grew by more than 5 MiB after the first minute (or the first tenth of a shorter run), or when more than 5 %
of a core was taken from then on.
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

MOST_GROWTH = 5 * 2**20  # bytes
MOST_CORE = 0.05
LONGEST = 600.0  # seconds


def drain(terminal, until):
    """Reads what is drawn, as a terminal does, until then."""
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], min(left, 1.0))[0]:
            try:
                if not os.read(terminal, 1 << 16):
                    return
            except OSError:  # it has ended
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=LONGEST)
    parser.add_argument("--size", default="80x24")
    parser.add_argument("--keys", default="", help="what to press after the start")
    parser.add_argument("arguments", nargs="*", help="of tk top")
    given = parser.parse_args()
    seconds = min(given.seconds, LONGEST)
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
    begun = time.monotonic()
    drain(terminal, begun + 5.0)
    os.write(terminal, given.keys.encode())
    settled = min(60.0, max(10.0, seconds / 10))
    drain(terminal, begun + settled)

    def used():
        times = process.cpu_times()
        return times.user + times.system

    cpu, memory, since = used(), process.memory_info().rss, time.monotonic()
    most = memory
    for minute in range(1, 100):
        until = min(begun + seconds, since + 60.0 * minute)
        drain(terminal, until)
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            print("tk top has ended by itself")
            return 1
        now, share = process.memory_info().rss, (used() - cpu) / (time.monotonic() - since)
        most = max(most, now)
        print(
            f"{time.monotonic() - begun:5.0f} s  {now / 2**20:6.1f} MiB  {share:.2%} of a core",
            flush=True,
        )
        if until >= begun + seconds:
            break
    os.write(terminal, b"q")
    drain(terminal, time.monotonic() + 2.0)
    process.terminate()
    os.waitpid(child, 0)
    growth = most - memory
    print(f"memory grew by {growth / 2**20:.1f} MiB after {settled:.0f} s; {share:.2%} of a core")
    return 0 if growth <= MOST_GROWTH and share <= MOST_CORE else 1


if __name__ == "__main__":
    sys.exit(main())
