"""What every client process sets up before it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def raise_file_limit() -> None:
    """Every request in flight is an open file."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
