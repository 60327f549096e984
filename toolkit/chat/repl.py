"""The interactive prompt: reads questions and commands until the user leaves."""

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

from toolkit.chat.commands import BLOCK, COMMANDS, SETTABLE, handle_line, show
from toolkit.chat.screen.terminal import printable
from toolkit.chat.session import Session
from toolkit.chat.state import private_file, state_folder
from toolkit.logs import escape_line

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
PLACEHOLDER = "Ask something. Alt-Enter: new line, /help: commands and keys"


async def converse(session: Session, prompt: PromptSession[str] | None = None) -> int:
    """Read and answer until /exit, Ctrl-D or two Ctrl-C. Return the exit code."""
    prompt = make_prompt(session) if prompt is None else prompt
    while not session.signals.should_leave:
        draft, session.draft = session.draft, ""
        try:
            line = await prompt.prompt_async(_prompt_label(session), default=draft)
        except KeyboardInterrupt:
            session.signals.count_ctrl_c(time.monotonic())
            if session.is_editing:
                session.is_editing = False
                session.terminal.note("Edit cancelled.")
            elif not session.signals.should_leave:
                session.terminal.note("Press Ctrl-C again to leave, or Ctrl-D.")
            continue
        except EOFError:
            return 0
        finally:
            session.signals.install()
            session.terminal.keyboard.hide_input()
        if not await handle_line(session, printable(line)):
            return 0
    return 130


def make_prompt(
    session: Session, input: Input | None = None, output: Output | None = None
) -> PromptSession[str]:
    """Make a multi-line editor with completion and the history of earlier runs.

    Without `output` it writes to the terminal: to stderr if stdout is redirected."""
    keys = KeyBindings()

    is_typing = has_focus(DEFAULT_BUFFER)  # not searching, which has its own Enter

    @keys.add("enter", filter=is_typing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=is_typing)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-t")
    async def show_reasoning(event: KeyPressEvent) -> None:
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


def is_open_block(text: str) -> bool:
    """Return True while the end of a block of several lines is missing."""
    text = text.strip()
    return text.startswith(BLOCK) and (len(text) < 2 * len(BLOCK) or not text.endswith(BLOCK))


def _placeholder(session: Session) -> StyleAndTextTuples:
    """Return the text shown while the input is empty; none once it is sent."""
    is_needed = session.pending_call is None and not get_app().is_done
    return [("class:placeholder", PLACEHOLDER)] if is_needed else []


def _prompt_label(session: Session) -> StyleAndTextTuples:
    """Return the text before the cursor."""
    if session.pending_call is not None:
        name = escape_line(session.pending_call["function"]["name"])
        return [("class:prompt", f"result of {name}> ")]
    images = (
        f"[{len(session.images)} image{'s' if len(session.images) > 1 else ''}] "
        if session.images
        else ""
    )
    return [("", images), ("class:prompt", "> ")]


class SlashCompleter(Completer):
    """Completes commands by a subsequence of their letters, and some arguments."""

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
        elif completer := self._argument_completer(name):
            yield from completer.get_completions(Document(argument), event)

    def _argument_completer(self, name: str) -> Completer | None:
        words = {"/set": SETTABLE, "/show": ("messages", "reasoning"), "/copy": ("code",)}
        if name in words:
            return WordCompleter(words[name], sentence=True)
        if name in ("/image", "/load", "/save"):
            return PathCompleter(expanduser=True)
        return None
