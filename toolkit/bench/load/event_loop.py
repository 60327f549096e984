"""Event loop and file limit of a client process."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's factory, or asyncio's if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def raise_file_limit() -> None:
    """Raise the limit of open files: every request in flight is one."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
