"""The names of the commands."""

SUBJECTS = {
    "Serve": ("serve", "ps", "stop", "logs", "chat", "run", "transcribe"),
    "Measure": ("bench", "top"),
    "Models": ("models", "pull", "show", "rm"),
    "Machine": ("config", "doctor", "verify", "collect-env", "man", "completion"),
}  # commands by the subject that the help lists them under
COMMANDS = tuple(name for names in SUBJECTS.values() for name in names)

ALIASES = {"list": "models", "ls": "models", "version": "--version"}  # and `help COMMAND`

VALUES = "__values"  # command that completion scripts call for model names
