"""How an answer is shown while it comes."""

from __future__ import annotations

from typing import Protocol

from toolkit.chat.answer_view import Answer
from toolkit.chat.history import call_text
from toolkit.chat.screen.terminal import Terminal


class Display(Protocol):
    """Shows one answer."""

    def update(self, answer: Answer) -> None:
        """More of it has come."""

    def refresh(self) -> float:
        """Draws what has changed; seconds until it should be called again."""

    def redraw(self) -> None:
        """Something else has written to the screen."""

    def finish(self) -> None:
        """Nothing more comes; the cursor is left at the beginning of a line."""


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
    """Writes the text as it comes."""

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
            self._terminal.note(f"→ {call_text(call)}")


def display_for(terminal: Terminal, reasoning: str, language: str | None = None) -> Display:
    """The arguments are those of LiveDisplay."""
    if not terminal.is_live:
        return PlainDisplay(terminal)
    from toolkit.chat.screen.live import LiveDisplay

    return LiveDisplay(terminal, reasoning, language)
