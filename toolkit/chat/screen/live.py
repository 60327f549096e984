"""An answer on a terminal: Markdown that is drawn anew at its end."""

from __future__ import annotations

import time

from rich.style import Style
from rich.text import Text

from toolkit.chat.answer_view import Answer
from toolkit.chat.history import call_text
from toolkit.chat.screen.markdown import PROSE_WIDTH, Block, BlockRenderer, MarkdownStream
from toolkit.chat.screen.region import Region
from toolkit.chat.screen.terminal import CONTROLS, Terminal

FRAME = 1 / 30  # seconds
BUSY = 3  # of the time, at most one part in this many goes into drawing
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PATIENCE = 0.3  # seconds without an answer, until it is said that it is waited for
THOUGHT_LINES = 6
DIM = Style(dim=True)


class LiveDisplay:
    """Finished blocks go to the screen for good; the last one is drawn anew until it is finished."""

    def __init__(self, terminal: Terminal, reasoning: str, language: str | None = None) -> None:
        """`reasoning`: full, short or hidden. `language`: the answer is code of that language, and not Markdown."""
        self._terminal = terminal
        self._reasoning = reasoning
        self._region = Region(terminal.out, terminal.size)
        self._renderer = BlockRenderer(terminal.console)
        self._stream = MarkdownStream()
        if language is not None:
            self._stream.feed(f"```{language}\n")
        self._answer = Answer()
        self._fed = 0
        self._last: Block | None = None  # on the screen for good
        self._thought = False  # the reasoning is dealt with
        self._began = time.monotonic()

    def update(self, answer: Answer) -> None:
        self._answer = answer
        self._stream.feed(answer.content[self._fed :].translate(CONTROLS))
        self._fed = len(answer.content)

    def refresh(self) -> float:
        began = time.monotonic()
        if self._answer.is_empty:
            self._region.draw(self._waiting(began - self._began))
        else:
            self._end_thought()
            self._commit(self._stream.take_finished())
            self._region.draw(self._draft())
        return max(FRAME, BUSY * (time.monotonic() - began))

    def redraw(self) -> None:
        self._region.forget()

    def finish(self) -> None:
        if self._answer.is_empty and not self._answer.reasoning:
            self._region.draw([])
            return
        self._end_thought()
        self._commit(self._stream.take_rest())
        self._region.draw(self._calls(self._last is not None))
        self._region.commit()

    def _width(self) -> int:
        return max(1, self._terminal.size().columns - 1)

    def _lines(self, blocks: list[Block]) -> list[str]:
        return self._renderer.lines(blocks, self._width(), self._last)

    def _draft(self) -> list[str]:
        """What is not finished. Of a table that is longer than the screen, the end: its columns may still move, and what
        has left the screen cannot.
        """
        blocks = self._stream.draft()
        lines = self._lines(blocks)
        rows = self._terminal.size().lines
        if blocks and blocks[-1].is_table and len(lines) > rows - 1:
            above = len(lines) - (rows - 2)
            lines = [*self._dim(f"⋮ {above} lines above"), *lines[above:]]
        return lines + self._calls(bool(lines))

    def _commit(self, blocks: list[Block]) -> None:
        for block in blocks:
            lines = self._lines([block])
            if lines:
                self._region.draw(lines)
                self._region.commit()
                self._last = block

    def _dim(self, text: str, style: Style = DIM) -> list[str]:
        return self._renderer.render(Text(text, style=style), self._width())

    def _calls(self, after_text: bool) -> list[str]:
        """The calls of tools, below the text."""
        calls = [call for call in self._answer.tool_calls if call["function"]["name"]]
        lines = [
            line
            for call in calls
            for line in self._dim(f"→ {call_text(call)}".translate(CONTROLS), Style(bold=True))
        ]
        return [""] * (after_text and bool(lines)) + lines

    def _waiting(self, seconds: float) -> list[str]:
        """What is to be seen before the answer begins."""
        if seconds < PATIENCE:
            return []
        what = "thinking" if self._answer.reasoning else "waiting"
        frame = SPINNER[int(seconds * 10) % len(SPINNER)]
        head = self._dim(f"{frame} {what} {seconds:.0f} s")
        if self._reasoning == "hidden":
            return head
        thought = self._thoughts()
        if self._reasoning == "full":
            return [*thought, *head]
        room = max(0, min(THOUGHT_LINES, self._terminal.size().lines - 2))
        return (
            [*head, *thought[len(thought) - room :]] if room < len(thought) else [*head, *thought]
        )

    def _thoughts(self) -> list[str]:
        text = self._answer.reasoning.strip().translate(CONTROLS)
        if not text:
            return []
        width = min(self._width(), PROSE_WIDTH)
        return self._renderer.render(Text(text, style=Style(dim=True, italic=True)), width)

    def _end_thought(self) -> None:
        """Folds the reasoning, once."""
        if self._thought:
            return
        self._thought = True
        self._region.draw([])
        if not self._answer.reasoning:
            return
        lines = self._thoughts() if self._reasoning == "full" else []
        self._region.draw([*lines, *self._dim(thought_line(self._answer)), ""])
        self._region.commit()


def thought_line(answer: Answer) -> str:
    """What stands in the place of reasoning that is folded."""
    seconds = (answer.thought or answer.last or 0.0) - (answer.first or 0.0)
    words = len(answer.reasoning.split())
    return f"▸ thought for {seconds:.1f} s, {words:,} word{'s' if words != 1 else ''}: Ctrl-T or /show reasoning unfolds it"
