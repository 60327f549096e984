"""The names of the commands."""

from __future__ import annotations

SUBJECTS = {
    "Serve": ("serve", "chat", "run"),
    "Measure": ("bench", "top"),
    "Models": ("models", "pull", "show", "rm"),
    "This machine": ("config", "doctor", "collect-env", "man", "completion"),
}
"""The commands, as the help groups them."""
COMMANDS = tuple(name for names in SUBJECTS.values() for name in names)

VALUES = "__values"
"""The command that completion scripts call for values that only the machine or a server knows."""
