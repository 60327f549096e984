"""`tk chat`: find or start a server, then talk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import httpx

from toolkit.bench.wire import ServerError
from toolkit.chat.client import AnswerStats, ChatClient
from toolkit.chat.conversation import Conversation
from toolkit.chat.local import local_server
from toolkit.chat.terminal import Terminal
from toolkit.config.clients import DEFAULT_URL, ChatConfig
from toolkit.errors import ConfigError


def run(config: ChatConfig) -> int:
    """Talks until the user leaves, or answers what came through a pipe; the exit code of the command."""
    terminal = Terminal()
    question = None
    if not sys.stdin.isatty():
        try:
            question = sys.stdin.read().strip()
        except UnicodeDecodeError:
            raise ConfigError("What came through stdin is not text.") from None
        if not question:
            raise ConfigError("Nothing came through stdin: there is no message to answer.")
    with connected(config, terminal) as client, closing(client):
        if question is not None:
            answer_once(client, terminal, question)
        else:
            from toolkit.chat.repl import converse
            from toolkit.chat.session import Session

            terminal.note(f"{client.model} at {client.url}. /help lists the commands, Ctrl-D leaves.")
            converse(Session(client, terminal))
    return 0


def answer_once(client: ChatClient, terminal: Terminal, question: str) -> None:
    """Streams one answer to stdout. Raises ServerError when there is none."""
    conversation = Conversation(system=client.config.system)
    answer = ""
    try:
        with closing(client.ask(conversation.messages(question), AnswerStats())) as pieces:
            for piece in pieces:
                answer += piece
                terminal.piece(piece)
        terminal.end_answer(answer)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that the last flush finds a reader


@contextmanager
def connected(config: ChatConfig, terminal: Terminal) -> Iterator[ChatClient]:
    """A client of the server at --url, or of the one that runs here, or of a private one.

    Raises ServerError when it cannot be reached or started.
    """
    if config.url is not None:
        client = ChatClient(config.url, config, api_key=config.api_key, model=config.model)
        if client.model is None:
            client.first_model()
        yield client
        return
    if config.model is None and (here := running_here(config, terminal)) is not None:
        terminal.note(f"Using the server that runs at {DEFAULT_URL}.")
        yield here
        return
    what = config.model or "the demo model"
    with waiting(terminal, f"Starting {what}") as tick, local_server(config.model, tick=tick) as server:
        tick(-1.0)
        client = ChatClient(server.url, config, api_key=server.api_key)
        client.first_model()
        yield client


def running_here(config: ChatConfig, terminal: Terminal) -> ChatClient | None:
    """A client of the server at the default address, when a healthy one that lists a model answers there."""
    client = ChatClient(DEFAULT_URL, config, api_key=config.api_key)
    try:
        if client.http.get("/health", timeout=1.0).status_code == 200:
            client.first_model()
            return client
    except httpx.HTTPError:
        pass
    except ServerError as error:
        terminal.note(f"{error.message} Starting a private server instead.")
    client.close()
    return None


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
