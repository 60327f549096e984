"""The tree of commands, and the error messages of the command line."""

import errno
import logging
import shutil
import sys
import textwrap
import traceback
from contextlib import suppress
from functools import cache
from importlib import import_module

import typer

from toolkit.cli.help import HELP_FLAGS, CommandGroup, RootGroup
from toolkit.cli.names import COMMANDS
from toolkit.errors import OutOfMemoryError, ToolkitError
from toolkit.logs import (
    escape_controls,
    flush_stderr,
    save_traceback,
    shows_tracebacks,
    writes_json,
)

EXIT_CODES = {
    0: "Success.",
    1: "Failure: a failed check, a model that does not fit, an incomplete answer; or "
    "an internal error, whose message says where its traceback is.",
    2: "Usage error: a flag, setting, model or server that cannot be used. The message says which.",
    130: "Ctrl-C.",
}  # exit codes of every command

app = typer.Typer(
    name="tk",
    cls=RootGroup,
    help="Serve language models from the command line.",
    epilog="Flags: tk help COMMAND. Manual: tk man COMMAND. Version: tk version.\n"
    "Exit codes: 0 success, 1 failure, 2 usage error, 130 Ctrl-C.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help fits 80 columns and keeps brackets
    context_settings={"help_option_names": HELP_FLAGS},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:  # with other flags; `main` handles it alone
        from toolkit.version import __version__

        print(f"tk {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@cache
def tree() -> CommandGroup:
    """Return Typer's object of `tk` with all commands."""
    for name in COMMANDS:
        import_module(f"toolkit.cli.commands.{name.replace('-', '_')}")
    group = typer.main.get_command(app)
    assert isinstance(group, CommandGroup)
    group.commands = {name: group.commands[name] for name in COMMANDS}
    return group


def run() -> int:
    """Run the command and return its exit code. An error is one paragraph on stderr."""
    try:
        code: int = tree().main(prog_name="tk", standalone_mode=False) or 0
    except Exception as error:
        _flush_output()
        if shows_tracebacks() and not writes_json():
            print(escape_controls(traceback.format_exc()), file=sys.stderr)
        return explain(error)
    failed = _flush_output()
    if isinstance(failed, BrokenPipeError):  # its reader has ended
        return 1
    return code if failed is None else explain(failed)


def _flush_output() -> OSError | None:
    """Flush stdout and return the error. The flush at exit could not explain it.

    After an error it is closed: what it still holds would fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            sys.stdout.close()
        return error
    return None


def explain(error: Exception) -> int:
    """Print an error to stderr and return the exit code. Errors of all commands end here.

    A ToolkitError is one paragraph. A bug is one line; its traceback goes to `errors.log`."""
    if isinstance(error, ToolkitError):
        return _fail(error.message, 1 if isinstance(error, OutOfMemoryError) else 2)
    if isinstance(error, typer.TyperException):
        return _fail(_usage_message(error), error.exit_code)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fail(
            f"Cannot write to {error.filename or 'the output or a file'}: {error.strerror}.", 2
        )
    text = " ".join(str(error).split())[:300]
    return _fail(
        f"internal error: {type(error).__name__}{f': {text}' if text else ''}. "
        f"{save_traceback(error)} Please report it with the output of 'tk collect-env'.",
        1,
    )


def _usage_message(error: typer.TyperException) -> str:
    message: str = error.format_message()
    context = getattr(error, "ctx", None)
    if not message.startswith("Got unexpected extra"):
        return message
    command = getattr(context, "info_name", "")
    more = message.partition(" (")[2].removesuffix(")")
    if command == "serve":
        return (
            f"A server has one model; also given: {more}. Start a server for each model, each with "
            "its own --port."
        )
    if command in ("chat", "run"):
        return f"Put the prompt in quotes; it is followed by: {more}."
    return f"tk {command} does not take these arguments: {more}."


def _fail(message: str, code: int) -> int:
    """Print the message, wrapped on a terminal, and return the code. A log in JSON gets it."""
    if writes_json():
        logging.getLogger("toolkit.cli").critical(message)
        flush_stderr()
        return code
    text = escape_controls(f"tk: {message}")
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in text.split("\n")
        )
        text = "\n".join(lines)
    print(text, file=sys.stderr)
    flush_stderr()
    return code
