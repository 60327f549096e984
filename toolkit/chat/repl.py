"""The prompt: reads lines until the user leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.chat.session import Session
from toolkit.chat.state import private_file, state_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output


def converse(session: Session, prompt: PromptSession[str] | None = None) -> None:
    """Reads and answers until /exit or Ctrl-D."""
    prompt = make_prompt() if prompt is None else prompt
    while True:
        try:
            line = prompt.prompt("> ")
        except KeyboardInterrupt:
            session.terminal.note("Ctrl-D or /exit leaves.")
            continue
        except EOFError:
            return
        if not session.handle(line):
            return


def make_prompt(input: Input | None = None, output: Output | None = None) -> PromptSession[str]:
    """A line editor with the history of earlier runs; Alt-Enter begins a new line.

    Without `output` it writes to the terminal, on stderr when stdout is something else.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: object) -> None:
        event.current_buffer.insert_text("\n")  # type: ignore[attr-defined]  # prompt_toolkit's KeyPressEvent

    return PromptSession(
        history=FileHistory(str(private_file(state_folder() / "chat-history"))),
        completer=WordCompleter([*Session.COMMANDS, "/exit"], sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        input=input,
        output=create_output(always_prefer_tty=True) if output is None else output,
    )
