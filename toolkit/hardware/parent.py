"""A process that never outlives the one that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_has_parent = False


def is_own_process() -> bool:
    """Whether this process is tk's alone: nobody else's threads run in it."""
    return _has_parent


def end_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Ends this process when the other end of its standard input closes, which its parent holds; `clean_up` comes first.

    On Linux the parent's death also wakes a process that was stopped, which could not see it.
    """
    global _has_parent
    _has_parent = True
    wake_with_parent()

    def wait() -> None:
        while os.read(0, 1024):
            pass
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()


def wake_with_parent() -> None:
    """Has this process go on when its parent ends, should it be stopped then; on Linux alone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
