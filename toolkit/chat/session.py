"""The conversation: what each line that the user enters does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from toolkit.bench.wire import ServerError
from toolkit.chat.client import AnswerStats, ChatClient
from toolkit.chat.conversation import Conversation
from toolkit.chat.terminal import Terminal
from toolkit.errors import did_you_mean

HELP = """\
/help              this text
/new               forget the conversation
/system TEXT       set the system message and begin anew; without TEXT: show it
/regenerate        answer the last question again
/save FILE         write the conversation to a file
/exit              leave; so does Ctrl-D
Ctrl-C stops an answer; what came of it stays in the conversation.
Alt-Enter begins a new line in a message."""


class Session:
    """One conversation with one server."""

    def __init__(self, client: ChatClient, terminal: Terminal) -> None:
        self.client = client
        self.terminal = terminal
        self.conversation = Conversation(system=client.config.system)

    def handle(self, line: str) -> bool:
        """Does what one entered line asks for; False when it asks to leave."""
        line = line.strip()
        if not line:
            return True
        if not line.startswith("/"):
            self.ask(line)
            return True
        name, _, argument = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name in self.COMMANDS:
            self.COMMANDS[name](self, argument.strip())
        else:
            hint = did_you_mean(name, self.COMMANDS) or " /help lists the commands."
            self.terminal.error(f"There is no command {name}.{hint}")
        return True

    def ask(self, question: str) -> str:
        """Streams the answer to the terminal and keeps it, whole or stopped by Ctrl-C.

        Returns what came of it. A failure is shown and leaves the conversation as it was.
        """
        stats = AnswerStats()
        answer = ""
        stopped = False
        pieces = self.client.ask(self.conversation.messages(question), stats)
        try:
            with contextlib.closing(pieces):
                for piece in pieces:
                    answer += piece
                    self.terminal.piece(piece)
        except KeyboardInterrupt:
            stopped = True
        except ServerError as error:
            if answer:
                self.terminal.end_answer(answer)
            self.terminal.error(error.message)
            self.conversation.close(question, answer)
            return answer
        self.conversation.close(question, answer)
        if answer or not stopped:
            self.terminal.end_answer(answer)
        self.terminal.note(", ".join(filter(None, ["stopped" if stopped else "", stats.line()])))
        if not answer and not stopped:
            self.terminal.note("The answer is empty.")
        return answer

    def help(self, argument: str) -> None:
        self.terminal.note(HELP)

    def new(self, argument: str) -> None:
        self.conversation.clear()
        self.terminal.note("A new conversation.")

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.system = argument
            self.conversation.clear()
            self.terminal.note("A new conversation with this system message.")
        else:
            self.terminal.note(self.conversation.system or "There is no system message.")

    def regenerate(self, argument: str) -> None:
        before = list(self.conversation.turns)
        question = self.conversation.take_back()
        if question is None:
            self.terminal.error("There is nothing to answer again.")
        elif not self.ask(question) and len(self.conversation.turns) < len(before):
            self.conversation.turns, self.conversation.unanswered = (
                before,
                None,
            )  # the old answer is the better one

    def save(self, argument: str) -> None:
        if not argument:
            self.terminal.error("/save takes the name of a file.")
            return
        path = Path(argument).expanduser()
        try:
            path.write_text(self.conversation.transcript())
        except OSError as error:
            self.terminal.error(f"Cannot write {path}: {error.strerror}.")
        else:
            self.terminal.note(f"Saved to {path}")

    COMMANDS: ClassVar[dict[str, Callable[[Session, str], None]]] = {
        "/help": help,
        "/new": new,
        "/system": system,
        "/regenerate": regenerate,
        "/save": save,
    }
