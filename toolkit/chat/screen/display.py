"""Display of an answer while it is streamed."""

from typing import Protocol

from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.history import format_call
from toolkit.chat.screen.terminal import Terminal


class Display(Protocol):
    """Shows one answer."""

    def update(self, answer: Answer) -> None:
        """Take the new state of the answer."""

    def refresh(self) -> float:
        """Draw the changes and return the seconds until the next call."""

    def redraw(self) -> None:
        """Draw everything again, after another program wrote to the screen."""

    def finish(self) -> None:
        """Draw the rest and move the cursor to the start of a line."""


class NoDisplay:
    """Shows nothing."""

    def update(self, answer: Answer) -> None:
        pass

    def refresh(self) -> float:
        return 1.0

    def redraw(self) -> None:
        pass

    def finish(self) -> None:
        pass


class PlainDisplay(NoDisplay):
    """Writes the text as it arrives."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._written = ""
        self._answer = Answer()

    def update(self, answer: Answer) -> None:
        self._answer = answer
        self._terminal.write(answer.content[len(self._written) :])
        self._written = answer.content

    def finish(self) -> None:
        if self._written and not self._written.endswith("\n"):
            self._terminal.write("\n")
        for call in self._answer.tool_calls:
            self._terminal.note(f"→ {format_call(call)}")


def display_for(terminal: Terminal, reasoning: str, language: str | None = None) -> Display:
    """Choose the display for the terminal. Arguments are those of LiveDisplay."""
    if not terminal.is_live:
        return PlainDisplay(terminal)
    from toolkit.chat.screen.live import LiveDisplay

    return LiveDisplay(terminal, reasoning, language)
