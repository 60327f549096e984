"""`tk chat`."""

import shlex

import typer

from toolkit.cli.command import command
from toolkit.cli.help import known_settings
from toolkit.cli.root import app, tree
from toolkit.config import ModelConfig
from toolkit.config.clients import ChatConfig
from toolkit.config.fields import options
from toolkit.config.sources import resolve
from toolkit.errors import ConfigError, ToolkitError


@command(app, "chat", ChatConfig)
def chat(config: ChatConfig) -> None:
    """Chat with a model in the terminal.

    With a PROMPT or piped text it answers once, and only the answer goes to stdout."""
    from toolkit.chat.run import run

    raise typer.Exit(run(config, prepare=prepare_chat))


def prepare_chat(model: str) -> None:
    """Download a model for a private server. Raises ToolkitError if it cannot chat, or is none."""
    from toolkit.hub import download_missing

    require_chat_template(model)
    download_missing(model)


def require_chat_template(model: str) -> None:
    """Raise ConfigError if a server of this model could not chat: it would load for nothing.

    Other problems are left to the server."""
    rows = [row for row in options(ModelConfig) if row.name == "chat_template"]
    if resolve(rows, {}, ("serve",), known_settings(tree())):
        return
    from toolkit.inventory.card import chat_template
    from toolkit.inventory.find import find_checkpoint

    try:
        checkpoint = find_checkpoint(model)
        has_template, hears = chat_template(checkpoint) is not None, checkpoint.hears
    except ToolkitError:
        return
    if hears:
        raise ConfigError(
            f"{model} transcribes sound, and does not chat. Transcribe a file: tk transcribe "
            f"speech.wav --model {shlex.quote(model)}.",
            param="model",
        )
    if not has_template:
        raise ConfigError(
            f"{model} has no chat template, so it cannot take messages: it continues text. "
            f'Continue one: tk run {shlex.quote(model)} "Once upon a time". TK_CHAT_TEMPLATE names '
            "a file with a template to use.",
            param="model",
        )
