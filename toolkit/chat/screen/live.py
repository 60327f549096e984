"""Answers on a terminal: Markdown whose last block is redrawn while it grows."""

import time

from rich.style import Style
from rich.text import Text

from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.history import format_call
from toolkit.chat.screen.markdown import PROSE_WIDTH, BlockRenderer, MarkdownBlock, MarkdownStream
from toolkit.chat.screen.region import Region
from toolkit.chat.screen.terminal import Terminal
from toolkit.logs import escape_controls

FRAME = 1 / 30  # seconds
BUSY = 3  # at most 1 / BUSY of the time is spent drawing
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_DELAY = 0.3  # seconds without an answer until the spinner appears
REASONING_LINES = 6  # shown while the model reasons
DIM = Style(dim=True)


class LiveDisplay:
    """Writes finished blocks once and redraws the last block until it is finished."""

    def __init__(self, terminal: Terminal, reasoning: str, language: str | None = None) -> None:
        """`reasoning`: full, short or hidden. `language`: of an answer that is code."""
        self._terminal = terminal
        self._reasoning = reasoning
        self._region = Region(terminal.out, terminal.size)
        self._renderer = BlockRenderer(terminal.console)
        self._stream = MarkdownStream()
        if language is not None:
            self._stream.feed(f"```{language}\n")
        self._answer = Answer()
        self._num_fed = 0  # characters
        self._last_block: MarkdownBlock | None = None  # finished
        self._is_reasoning_folded = False
        self._began = time.monotonic()

    def update(self, answer: Answer) -> None:
        self._answer = answer
        self._stream.feed(escape_controls(answer.content[self._num_fed :]))
        self._num_fed = len(answer.content)

    def refresh(self) -> float:
        began = time.monotonic()
        if self._answer.is_empty:
            self._region.draw(self._waiting_lines(began - self._began))
        else:
            self._fold_reasoning()
            self._commit(self._stream.take_finished())
            self._region.draw(self._draft_lines())
        return max(FRAME, BUSY * (time.monotonic() - began))

    def redraw(self) -> None:
        self._region.reset()

    def finish(self) -> None:
        if self._answer.is_empty and not self._answer.reasoning:
            self._region.draw([])
            return
        self._fold_reasoning()
        self._commit(self._stream.take_rest())
        self._region.draw(self._call_lines(self._last_block is not None))
        self._region.commit()

    def _width(self) -> int:
        return max(1, self._terminal.size().columns - 1)

    def _lines(self, blocks: list[MarkdownBlock]) -> list[str]:
        return self._renderer.lines(blocks, self._width(), self._last_block)

    def _draft_lines(self) -> list[str]:
        """Render the unfinished blocks. A table taller than the screen is cut to its end."""
        blocks = self._stream.draft()
        lines = self._lines(blocks)
        rows = self._terminal.size().lines
        # Its columns may still change width, and lines off the screen cannot be redrawn.
        if blocks and blocks[-1].is_table and len(lines) > rows - 1:
            above = len(lines) - (rows - 2)
            lines = [*self._dim(f"⋮ {above} lines above"), *lines[above:]]
        return lines + self._call_lines(bool(lines))

    def _commit(self, blocks: list[MarkdownBlock]) -> None:
        for block in blocks:
            lines = self._lines([block])
            if lines:
                self._region.draw(lines)
                self._region.commit()
                self._last_block = block

    def _dim(self, text: str, style: Style = DIM) -> list[str]:
        return self._renderer.render(Text(text, style=style), self._width())

    def _call_lines(self, after_text: bool) -> list[str]:
        """Render the tool calls. `after_text`: put an empty line above them."""
        calls = [call for call in self._answer.tool_calls if call["function"]["name"]]
        lines = [
            line for call in calls for line in self._dim(f"→ {format_call(call)}", Style(bold=True))
        ]
        return [""] * (after_text and bool(lines)) + lines

    def _waiting_lines(self, seconds: float) -> list[str]:
        """Render the spinner and the reasoning, before the answer begins."""
        if seconds < SPINNER_DELAY:
            return []
        activity = "thinking" if self._answer.reasoning else "waiting"
        frame = SPINNER[int(seconds * 10) % len(SPINNER)]
        head = self._dim(f"{frame} {activity} {seconds:.0f} s")
        if self._reasoning == "hidden":
            return head
        lines = self._reasoning_lines()
        if self._reasoning == "full":
            return [*lines, *head]
        room = max(0, min(REASONING_LINES, self._terminal.size().lines - 2))
        return [*head, *lines[len(lines) - room :]] if room < len(lines) else [*head, *lines]

    def _reasoning_lines(self) -> list[str]:
        text = self._answer.reasoning.strip()
        if not text:
            return []
        width = min(self._width(), PROSE_WIDTH)
        return self._renderer.render(Text(text, style=Style(dim=True, italic=True)), width)

    def _fold_reasoning(self) -> None:
        """Replace the reasoning by one line, once; in `full`, keep it above that line."""
        if self._is_reasoning_folded:
            return
        self._is_reasoning_folded = True
        self._region.draw([])
        if not self._answer.reasoning:
            return
        lines = self._reasoning_lines() if self._reasoning == "full" else []
        self._region.draw([*lines, *self._dim(folded_line(self._answer)), ""])
        self._region.commit()


def folded_line(answer: Answer) -> str:
    """Return the line that replaces the reasoning."""
    end = answer.reasoning_end or answer.last_token or 0.0
    seconds = end - (answer.first_token or 0.0)
    words = len(answer.reasoning.split())
    return (
        f"▸ thought for {seconds:.1f} s, {words:,} word{'s' if words != 1 else ''} "
        "(Ctrl-T or /show reasoning shows it)"
    )
