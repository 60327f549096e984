"""A program in a pseudo-terminal: types keys and reads the emulated screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

from tests.forked import ForkedProcess, ForkServer

TIMEOUT = 90.0  # seconds
ENTER, ESCAPE, TAB = "\r", "\x1b", "\t"
CTRL_C, CTRL_D, CTRL_R, CTRL_T, CTRL_Z = "\x03", "\x04", "\x12", "\x14", "\x1a"


class PtyProgram:
    """Runs a command in its own session, on a screen of `columns` by `rows`.

    With a fork server, the command is `python -m MODULE`, which takes the terminal itself."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        columns: int = 80,
        rows: int = 24,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.001)
        self.screen.write_process_input = self.type  # answers cursor position requests
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        slave = self.slave

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        options = {
            "stdin": slave,
            "stdout": slave,
            "stderr": slave,
            "env": os.environ | {"TERM": "xterm-256color"} | environment,
        }
        self.process: subprocess.Popen[bytes] = (
            subprocess.Popen(command, **options, preexec_fn=take_terminal)
            if fork_server is None
            else ForkedProcess(fork_server, command, **options, start_new_session=True)
        )

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def wait(self, condition: str | Callable[[], bool]) -> None:
        """Wait until a text is on the screen, or a function returns True."""
        until = time.monotonic() + TIMEOUT
        while not (condition in self.text if isinstance(condition, str) else condition()):
            if time.monotonic() > until:
                raise AssertionError(f"not on the screen: {condition!r}\n{self.text}")
            self.read(0.05)

    def read(self, seconds: float) -> None:
        """Read the program's output, waiting at most `seconds` for some."""
        if select.select([self.master], [], [], seconds)[0]:
            data = os.read(self.master, 65536)
            self.raw += data
            self.stream.feed(data)

    def exit_code(self) -> int:
        """Wait until the program ends, and return its exit code."""
        self.wait(lambda: self.process.poll() is not None)
        while select.select([self.master], [], [], 0)[0]:
            self.read(0)
        return self.process.returncode

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def is_restored(self) -> bool:
        """True if the terminal's mode is the original one."""
        return termios.tcgetattr(self.slave)[:4] == self.before[:4]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)
