"""Which of the ranks that ended is to blame, and in what words."""

from __future__ import annotations

from collections.abc import Sequence

import toolkit.errors
from toolkit.errors import ToolkitError, WorkersLostError
from toolkit.executor.rank_messages import Broken

_LOST = (
    "closed by peer",
    "reset by peer",
    "Connection refused",
    "Broken pipe",
    "timed out",
    "Timed out",
)
"""What a rank says that misses another."""


def blamed(broken: Sequence[Broken]) -> Broken:
    """The rank that ended first of all, and not for lack of another: one that was killed, or hangs, or knows a reason."""
    return min(broken, key=_innocence)


def words(broken: Broken, name: str) -> str:
    """`name`: of the rank."""
    return f"{name} {broken.message}" if _innocence(broken) == 0 else f"{name}: {broken.message}"


def as_error(broken: Broken, name: str) -> Exception:
    """The user's mistake that a rank has met; else that it is lost."""
    kind = getattr(toolkit.errors, broken.kind, None) if broken.kind else None
    if isinstance(kind, type) and issubclass(kind, ToolkitError):
        return kind(broken.message)
    return WorkersLostError(words(broken, name))


def _innocence(broken: Broken) -> int:
    """0 for the one to blame rather than others."""
    if broken.message.startswith(("ended without a word", "has not finished")):
        return 0
    return 2 if not broken.kind and any(said in broken.message for said in _LOST) else 1
