"""A process that never outlives its parent, however the parent ends."""

import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_has_parent = False


def is_own_process() -> bool:
    """Return whether tk started this process, so that it has no foreign threads."""
    return _has_parent


def exit_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Call `clean_up` and exit once stdin is closed: the parent holds its other end.

    On Linux a stopped process is also resumed when its parent dies; it could not notice otherwise.
    """
    global _has_parent
    _has_parent = True
    resume_with_parent()

    def wait() -> None:
        while os.read(0, 1024):
            pass
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()


def resume_with_parent() -> None:
    """Resume this process, if it is stopped, when its parent dies. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
