"""The names of the commands."""

from __future__ import annotations

SUBJECTS = {
    "Serve": ("serve", "chat", "run"),
    "Measure": ("bench", "top"),
    "Models": ("models", "pull", "show", "rm"),
    "This machine": ("config", "doctor", "collect-env", "man", "completion"),
}
"""Commands by the subject that the help lists them under."""
COMMANDS = tuple(name for names in SUBJECTS.values() for name in names)

VALUES = "__values"  # command that completion scripts call for model names
