"""The prompt: reads questions and commands until the user leaves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, in_terminal
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    FuzzyWordCompleter,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from toolkit.chat.commands import COMMANDS, SETTABLE, handle_line, show
from toolkit.chat.screen.terminal import printable
from toolkit.chat.session import Session
from toolkit.chat.state import private_file, state_folder

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

STYLE = Style.from_dict(
    {
        "prompt": "bold ansicyan",
        "placeholder": "ansibrightblack",
        "completion-menu": "bg:default default",
        "completion-menu.completion": "bg:default default",
        "completion-menu.completion.current": "bg:default default reverse",
        "completion-menu.meta.completion": "bg:default ansibrightblack",
        "completion-menu.meta.completion.current": "bg:default ansibrightblack",
        "scrollbar.background": "bg:default",
        "scrollbar.button": "bg:ansibrightblack",
    }
)
PLACEHOLDER = "Ask something. Alt-Enter: a new line, /help: more"


async def converse(session: Session, prompt: PromptSession[str] | None = None) -> int:
    """Reads and answers until /exit, Ctrl-D or two Ctrl-C; the exit code."""
    prompt = make_prompt(session) if prompt is None else prompt
    while not session.signals.leave:
        draft, session.draft = session.draft, ""
        try:
            line = await prompt.prompt_async(_label(session), default=draft)
        except KeyboardInterrupt:
            session.signals.press(time.monotonic())
            if session.is_edit:
                session.is_edit = False
                session.terminal.note("All stays as it was.")
            elif not session.signals.leave:
                session.terminal.note("Ctrl-C again leaves, and so does Ctrl-D.")
            continue
        except EOFError:
            return 0
        finally:
            session.signals.listen()
            session.terminal.keyboard.hush()
        if not await handle_line(session, printable(line)):
            return 0
    return 130


def make_prompt(
    session: Session, input: Input | None = None, output: Output | None = None
) -> PromptSession[str]:
    """An editor of several lines, with the history of earlier runs.

    Without `output` it writes to the terminal, on stderr when stdout is something else.
    """
    keys = KeyBindings()

    is_typing = has_focus(DEFAULT_BUFFER)  # and not searching, which has an Enter of its own

    @keys.add("enter", filter=is_typing)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=is_typing)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-t")
    async def unfold(event: KeyPressEvent) -> None:
        async with in_terminal():
            await show(session, "reasoning")

    @keys.add("c-z")
    async def suspend(event: KeyPressEvent) -> None:
        async with in_terminal():
            session.signals.suspend()

    prompt: PromptSession[str] = PromptSession(
        history=FileHistory(str(private_file(state_folder() / "chat-history"))),
        completer=SlashCompleter(session),
        complete_while_typing=Condition(lambda: prompt.default_buffer.text.startswith("/")),
        key_bindings=keys,
        multiline=True,
        prompt_continuation=lambda width, number, wrapped: " " * width,
        placeholder=lambda: _placeholder(session),
        style=STYLE,
        enable_open_in_editor=True,
        input=input,
        output=create_output(always_prefer_tty=True) if output is None else output,
    )
    return prompt


def _placeholder(session: Session) -> StyleAndTextTuples:
    """What stands where nothing is written, until it is sent."""
    is_needed = session.open_call is None and not get_app().is_done
    return [("class:placeholder", PLACEHOLDER)] if is_needed else []


def _label(session: Session) -> StyleAndTextTuples:
    """What stands before the cursor."""
    if session.open_call is not None:
        return [("class:prompt", f"result of {session.open_call['function']['name']}> ")]
    images = (
        f"[{len(session.images)} image{'s' if len(session.images) > 1 else ''}] "
        if session.images
        else ""
    )
    return [("", images), ("class:prompt", "> ")]


class SlashCompleter(Completer):
    """Commands by any of their letters in order, and what some of them take."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._commands = FuzzyWordCompleter(
            [name.removeprefix("/") for name in COMMANDS],
            meta_dict={name.removeprefix("/"): command.help for name, command in COMMANDS.items()},
        )

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/") or "\n" in line:
            return
        name, space, argument = line.partition(" ")
        if not space:
            yield from self._commands.get_completions(Document(name[1:]), event)
        elif completer := self._argument(name):
            yield from completer.get_completions(Document(argument), event)

    def _argument(self, name: str) -> Completer | None:
        words = {"/set": SETTABLE, "/show": ("messages", "reasoning"), "/copy": ("code",)}
        if name in words:
            return WordCompleter(words[name], sentence=True)
        if name in ("/image", "/load", "/save"):
            return PathCompleter(expanduser=True)
        return None
