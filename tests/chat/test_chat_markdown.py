"""Streamed Markdown ends up as rich renders it at once, and shown text is not taken back."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console
from rich.markdown import Markdown

from tests.chat.emulator import Emulator
from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.answers.delta import ChatDelta
from toolkit.chat.screen.live import LiveDisplay
from toolkit.chat.screen.markdown import code_blocks
from toolkit.chat.screen.region import Region

TOUR = """\
# A tour

Here is **bold text**, *italic*, `inline code`, ~~struck~~ and a \
[link](https://example.org/page) in a line that is long enough to wrap.

## Lists

- first item
- second item with **bold** words
  1. nested one
  2. nested two
- 第三个项目：中文字符很宽 🎉 and emoji

1. One
2. Two

```python
@dataclass
class Point:
    x: float = 0.0  # metres

    def norm(self):
        return self.x ** 2
```

| Engine | tok/s | Remark |
|:-------|------:|--------|
| one    | 205.6 | baseline |
| two    | 252.5 | **faster**, `graphs` |
| 中文   | 1.0   | wide 🎉 |

> A quote of **one** paragraph.

Setext heading
--------------

An end: `a*b` costs 2 ** 3, see [the notes].

[the notes]: https://example.org/notes
"""


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def cut(text: str, seed: int) -> list[str]:
    """Cut the text into pieces of 1 to 9 characters; with seed 0 of one."""
    random_size = random.Random(seed)
    pieces = []
    while text:
        size = 1 if seed == 0 else random_size.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def stream(pieces: list[str], emulator: Emulator, *, watch: bool = False) -> list[str]:
    """Show an answer piece by piece. With `watch`, return the screen's text after each piece."""
    display, answer, frames = LiveDisplay(emulator.terminal, "short"), Answer(), [""]
    num_written = 0
    for piece in pieces:
        answer.add(ChatDelta(content=piece))
        display.update(answer)
        display.refresh()
        if watch:
            is_new = len(emulator.written) > num_written
            frames.append(emulator.text if is_new else frames[-1])
            num_written = len(emulator.written)
    display.finish()
    return frames[1:]


def shown_by_rich(text: str, columns: int) -> list[str]:
    """Return the complete text as rich renders it."""
    out = io.StringIO()
    Console(file=out, width=columns).print(Markdown(text, hyperlinks=False))
    return out.getvalue().split("\n")


def words(lines: list[str]) -> list[str]:
    """Return the lines without indents, empty lines and rules."""
    stripped = [line.strip() for line in lines]
    return [re.sub(" +", " ", line) for line in stripped if line.strip("─-")]


@pytest.mark.parametrize(
    ("columns", "rows", "seed"),
    [(41, 24, 0), (81, 60, 1), (81, 6, 2)],
)
def test_stream_ends_as_rich_renders_the_text(columns, rows, seed):
    """The result does not depend on the pieces either."""
    at_once, in_pieces = Emulator(columns, 1000), Emulator(columns, rows)
    stream([TOUR], at_once)
    stream(cut(TOUR, seed), in_pieces)
    assert in_pieces.lines == at_once.lines
    assert words(in_pieces.lines) == words(shown_by_rich(TOUR, columns - 1))


def test_stream_never_takes_shown_text_back():
    text = TOUR.partition("An end")[0]
    emulator, at_once = Emulator(100, 45), Emulator(100, 1000)
    frames = stream(cut(text, 0), emulator, watch=True)
    stream([text], at_once)
    assert emulator.lines == at_once.lines
    end = re.sub("─+ ?", "", emulator.text)
    assert len(frames) > 500
    assert [frame for frame in frames if not end.startswith(re.sub("─+ ?", "", frame))] == []


@pytest.mark.parametrize(
    "text",
    [
        "Text\n- an item",
        "Text\n---\n",
        "a **bold** b",
        "`x | y` is code",
        "```py\nx\n```\n",
        "1. one\n2. two",
        "# Title",
    ],
)
def test_undecided_text_is_not_shown(text):
    emulator = Emulator()
    frames = stream(cut(text, 0), emulator, watch=True)
    for frame in frames:
        assert not set(frame) & set("*`#|=") - set(emulator.text), frame
    if text.startswith("Text\n- "):
        assert not any(char.underscore or char.bold for char in emulator.styles_of("Text"))


@pytest.mark.parametrize(
    "text", ["It is **very imp", "It is *very imp", "It is `very imp", "a ** b **very imp"]
)
def test_emphasis_and_code_are_styled_before_they_are_closed(text):
    emulator = Emulator()
    display, answer = LiveDisplay(emulator.terminal, "short"), Answer(content=text)
    display.update(answer)
    display.refresh()
    assert emulator.text == re.sub(r"[*`]+(?=\w)", "", text)
    assert all(
        char.bold or char.italics or char.fg == "cyan" for char in emulator.styles_of("very imp")
    )


@pytest.mark.parametrize("rows", [24, 5])
def test_code_longer_than_the_screen_is_complete(rows):
    code = "\n".join(f"line_{number} = {number}" for number in range(30))
    emulator = Emulator(rows=rows)
    stream(cut(f"Before\n\n```python\n{code}\n```\n\nAfter\n", 1), emulator)
    assert [line.strip() for line in emulator.lines if line] == [
        "Before",
        *code.split("\n"),
        "After",
    ]


def test_paragraph_longer_than_the_screen_is_complete():
    text = " ".join(f"word{number}" for number in range(120))
    emulator = Emulator(40, 10)
    stream(cut(text, 2), emulator)
    assert emulator.text == text
    assert len(emulator.lines) > 20


def test_table_longer_than_the_screen_is_complete():
    rows = "".join(
        f"| {number} | {'word ' * (number % 25)}{number} | {'x' * number} |\n"
        for number in range(26)
    )
    table = f"| n | text | more |\n|---|---|---|\n{rows}"
    at_once, in_pieces = Emulator(rows=1000), Emulator(rows=10)
    stream([table], at_once)
    frames = stream([*table.splitlines(keepends=True), "\nEnd"], in_pieces, watch=True)
    assert in_pieces.lines == [*at_once.lines, "", "End"]
    assert any("lines above" in frame for frame in frames)


def test_list_longer_than_the_screen_is_complete():
    items = "".join(f"{number}. {'word ' * (number * 7 % 30)}{number}\n" for number in range(1, 14))
    at_once, in_pieces = Emulator(rows=1000), Emulator(rows=10)
    stream([items], at_once)
    stream(cut(items, 3), in_pieces)
    assert in_pieces.lines == at_once.lines


def test_only_changes_are_written():
    emulator = Emulator(80, 24)
    pieces = cut(" ".join(f"word{number}" for number in range(60)), 0)
    stream(pieces, emulator)
    longest = max(len(text) for text in emulator.written)
    assert longest < 300  # not the six lines of the paragraph


def test_narrower_window_leaves_no_old_text():
    emulator = Emulator(80, 24)
    region = Region(emulator, emulator.terminal.size)
    region.draw(["a" * 60, "b" * 60])
    emulator.terminal.console.size = (40, 24)
    # The emulator does not wrap lines when it is resized.
    emulator.screen.reset()
    emulator.write("a" * 40 + "\r\n" + "a" * 20 + "\r\n" + "b" * 40 + "\r\n" + "b" * 20)
    region.draw(["c" * 39, "d"])
    assert emulator.lines == ["c" * 39, "d"]


def test_region_shrinks_to_the_remaining_lines():
    emulator = Emulator(20, 10)
    region = Region(emulator, emulator.terminal.size)
    for lines in (["a", "b", "c"], ["a"], ["a", "x", "y", "z"], ["q", "x"], []):
        region.draw(lines)
        assert emulator.lines == lines
    region.draw(["end"])
    region.commit()
    region.draw(["next"])
    assert emulator.lines == ["end", "next"]


def test_control_characters_do_not_reach_the_terminal():
    emulator = Emulator()
    stream(["before\x1b[2J\x1b]0;title\x07 after"], emulator)
    assert emulator.text == r"before\x1b[2J\x1b]0;title\x07 after"
    assert emulator.screen.title == ""


def test_html_is_shown_as_text():
    emulator = Emulator()
    stream(["<div>block</div>\n\nand <b>inline</b>"], emulator)
    assert emulator.lines == ["<div>block</div>", "", "and <b>inline</b>"]


def test_line_breaks_of_the_model_are_kept():
    emulator = Emulator()
    stream(["Roses are red\nviolets are blue"], emulator)
    assert emulator.lines == ["Roses are red", "violets are blue"]


def test_code_blocks_are_found():
    assert code_blocks(TOUR)[0].startswith("@dataclass\nclass Point:")
    assert code_blocks("none `here`") == []
