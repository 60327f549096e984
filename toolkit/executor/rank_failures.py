"""Causes of a rank's end, and the rank to blame when several end."""

from collections.abc import Sequence

from toolkit.errors import WorkersLostError, error_of_kind
from toolkit.executor.rank_messages import Broken, Cause

_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "Connection refused",
    "Broken pipe",
    "timed out",
    "Timed out",
)  # parts of the messages with which gloo and NCCL report that another rank is gone


def cause_of(error: Exception) -> Cause:
    """Return the cause that an exception in a rank stands for."""
    text = str(error)
    return Cause.LOST_PEER if any(part in text for part in _LOST_PEER) else Cause.FAILED


def blamed(broken: Sequence[Broken]) -> Broken:
    """Return the first of those with the most likely root cause."""
    return min(broken, key=lambda one: _ORDER[one.cause])


def describe(broken: Broken, name: str) -> str:
    """Return a sentence without its full stop. `name`: of the rank."""
    is_verb = broken.cause in (Cause.KILLED, Cause.HUNG)
    return f"{name} {broken.message}" if is_verb else f"{name}: {broken.message}"


def as_error(broken: Broken, name: str) -> Exception:
    """Return the ToolkitError that the rank met, or a WorkersLostError."""
    error = error_of_kind(broken.kind, broken.message)
    return error or WorkersLostError(describe(broken, name))


_ORDER = {Cause.KILLED: 0, Cause.HUNG: 0, Cause.FAILED: 1, Cause.LOST_PEER: 2}
