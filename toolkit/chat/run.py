"""`tk chat`: find or start a server, then talk."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from toolkit.chat import store
from toolkit.chat.client import Address, ChatClient, ModelCard
from toolkit.chat.local import local_server, turned_into_exit
from toolkit.chat.screen.terminal import Terminal, printable
from toolkit.chat.session import Session
from toolkit.client.wire import ServerError
from toolkit.config.clients import DEFAULT_URL, ChatConfig
from toolkit.errors import ConfigError


def run(config: ChatConfig) -> int:
    """Talks until the user leaves, or answers one question; the exit code of the command."""
    for name in (
        "COLUMNS",
        "LINES",
    ):  # a shell may have exported them, and the window changes its size
        os.environ.pop(name, None)
    terminal = Terminal()
    question = _question(config)
    if config.json and question is None:
        raise ConfigError(
            '--json needs a question: tk chat --json "What is a KV cache?"', param="json"
        )
    saved = _newest() if config.resume else None
    with (
        turned_into_exit(signal.SIGTERM, signal.SIGHUP),
        serving(config, terminal) as (address, card),
    ):
        try:
            return asyncio.run(_talk(config, terminal, address, card, question, saved))
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # so that the last flush finds a reader
            return 0


async def _talk(
    config: ChatConfig,
    terminal: Terminal,
    address: Address,
    card: ModelCard,
    question: str | None,
    saved: store.Saved | None,
) -> int:
    client = ChatClient(address)
    session = Session(client, card, config, terminal)
    if saved is not None and config.system is not None:
        saved.conversation.system = config.system
    try:
        with terminal.keyboard.quiet():
            if question is None:
                return await _converse(session, saved)
            from toolkit.chat.once import answer_once

            if saved is not None:
                session.begin(saved.conversation, saved.path)
            return await answer_once(session, question, is_continued=saved is not None)
    finally:
        await client.close()


async def _converse(session: Session, saved: store.Saved | None) -> int:
    from toolkit.chat.repl import converse

    session.terminal.note(f"{session.card.name} at {session.client.address.url}")
    if saved is not None:
        session.resume(saved)
    code = await converse(session)
    if session.conversation.messages:
        session.terminal.hint("'tk chat --continue' goes on from here.")
    return code


def _question(config: ChatConfig) -> str | None:
    """What was given on the command line, and what is piped in below it; None when the user is to be asked."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            piped = sys.stdin.read().strip()
        except UnicodeDecodeError:
            raise ConfigError("What came through stdin is not text.") from None
        if not piped and not config.prompt:
            raise ConfigError("Nothing came through stdin: there is no message to answer.")
    return printable("\n\n".join(filter(None, [config.prompt, piped]))) or None


def _newest() -> store.Saved:
    found = store.newest(1)
    if not found:
        raise ConfigError(
            "No conversation is saved yet: there is nothing to continue.", param="resume"
        )
    return found[0]


@contextmanager
def serving(config: ChatConfig, terminal: Terminal) -> Iterator[tuple[Address, ModelCard]]:
    """The server at --url, or the one that runs here, or a private one, and the model to ask.

    Raises ServerError when it cannot be reached or started.
    """
    if config.url is not None:
        address = Address(config.url, config.api_key)
        yield address, chosen(address, config.model)
        return
    if (here := running_here(config, terminal)) is not None:
        yield here
        return
    what = config.model or "the demo model"
    with (
        waiting(terminal, f"Starting {what}") as tick,
        local_server(config.model, tick=tick) as server,
    ):
        tick(-1.0)
        terminal.hint(
            "This server is private and ends with the chat; 'tk serve' starts one that stays."
        )
        address = Address(server.url, server.api_key)
        yield address, address.models()[0]


def chosen(address: Address, model: str | None) -> ModelCard:
    """The model of this name, or the first that the server lists. One that is not listed may exist all the same."""
    cards = address.models()
    if model is None:
        return cards[0]
    return next((card for card in cards if card.name == model), ModelCard(model))


def running_here(config: ChatConfig, terminal: Terminal) -> tuple[Address, ModelCard] | None:
    """The server at the default address, when a healthy one answers there that has the model."""
    address = Address(DEFAULT_URL, config.api_key)
    try:
        with httpx.Client(**address.http()) as http:
            if http.get("/health", timeout=1.0).status_code != 200:
                return None
        cards = address.models()
    except httpx.HTTPError:
        return None
    except ServerError as error:
        terminal.note(f"{error.message} Starting a private server instead.")
        return None
    return next(((address, card) for card in cards if config.model in (None, card.name)), None)


@contextmanager
def waiting(terminal: Terminal, what: str) -> Iterator[Callable[[float], None]]:
    """A function that shows how long `what` has taken; called with a negative number it shows no more.

    Nothing moves, and so no thread runs, before its first call: a child may be forked until then.
    """
    if not terminal.talk.is_terminal:
        terminal.note(f"{what} ...")
        yield lambda seconds: None
        return
    status = terminal.talk.status(f"{what} ...")

    def tick(seconds: float) -> None:
        if seconds < 0:
            status.stop()
        else:
            status.update(f"{what} ... {seconds:.0f} s")
            status.start()

    try:
        yield tick
    finally:
        status.stop()
