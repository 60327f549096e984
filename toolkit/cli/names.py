"""The names of the commands."""

SUBJECTS = {
    "Serve": ("serve", "chat", "run"),
    "Measure": ("bench", "top"),
    "Models": ("models", "pull", "show", "rm"),
    "This machine": ("config", "doctor", "verify", "collect-env", "man", "completion"),
}  # commands by the subject that the help lists them under
COMMANDS = tuple(name for names in SUBJECTS.values() for name in names)

VALUES = "__values"  # command that completion scripts call for model names
