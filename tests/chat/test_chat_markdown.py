"""Markdown that comes in pieces ends up as rich shows the whole of it, and nothing that was shown is taken back."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console
from rich.markdown import Markdown

from tests.chat.emulator import Emulator
from tests.combinations import pairwise
from toolkit.chat.answer_view import Answer
from toolkit.chat.delta import Delta
from toolkit.chat.screen.live import LiveDisplay
from toolkit.chat.screen.markdown import code_blocks
from toolkit.chat.screen.region import Region

TOUR = """\
# A tour

Here is **bold text**, *italic*, `inline code`, ~~struck~~ and a [link](https://example.org/page) in a line that is long enough to wrap.

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
    """The text in pieces of 1 to 9 characters; seed 0: of one."""
    random_size = random.Random(seed)
    pieces = []
    while text:
        size = 1 if seed == 0 else random_size.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def stream(pieces: list[str], emulator: Emulator, *, watch: bool = False) -> list[str]:
    """Shows an answer piece by piece; where somebody watches, the text on the terminal after each of them."""
    display, answer, frames = LiveDisplay(emulator.terminal, "short"), Answer(), []
    for piece in pieces:
        answer.add(Delta(content=piece))
        display.update(answer)
        display.refresh()
        if watch:
            frames.append(emulator.text)
    display.finish()
    return frames


def shown_by_rich(text: str, columns: int) -> list[str]:
    """What rich itself makes of the whole text."""
    out = io.StringIO()
    Console(file=out, width=columns).print(Markdown(text, hyperlinks=False))
    return out.getvalue().split("\n")


def words(lines: list[str]) -> list[str]:
    """The lines, without what is a matter of taste: indents, empty lines and rules."""
    stripped = [line.strip() for line in lines]
    return [re.sub(" +", " ", line) for line in stripped if line.strip("─-")]


@pytest.mark.parametrize(("columns", "rows", "seed"), pairwise([81, 41], [60, 24, 6], [0, 1]))
def test_the_end_is_what_rich_makes_of_the_whole(columns, rows, seed):
    emulator = Emulator(columns, rows)
    stream(cut(TOUR, seed), emulator)
    assert words(emulator.lines) == words(shown_by_rich(TOUR, columns - 1))


@pytest.mark.parametrize("rows", [60, 24, 6])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_pieces_do_not_matter(seed, rows):
    at_once, in_pieces = Emulator(rows=1000), Emulator(rows=rows)
    stream([TOUR], at_once)
    stream(cut(TOUR, seed), in_pieces)
    assert in_pieces.lines == at_once.lines


def test_no_frame_shows_what_a_later_one_takes_back():
    emulator = Emulator(100, 45)
    frames = stream(cut(TOUR.partition("An end")[0], 0), emulator, watch=True)
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
def test_what_is_undecided_is_not_shown(text):
    emulator = Emulator()
    frames = stream(cut(text, 0), emulator, watch=True)
    for frame in frames:
        assert not set(frame) & set("*`#|=") - set(emulator.text), frame
    if text.startswith("Text\n- "):
        assert not any(char.underscore or char.bold for char in emulator.styles_of("Text"))


@pytest.mark.parametrize(
    "text", ["It is **very imp", "It is *very imp", "It is `very imp", "a ** b **very imp"]
)
def test_emphasis_and_code_are_shown_before_they_are_closed(text):
    emulator = Emulator()
    display, answer = LiveDisplay(emulator.terminal, "short"), Answer(content=text)
    display.update(answer)
    display.refresh()
    assert emulator.text == re.sub(r"[*`]+(?=\w)", "", text)
    assert all(
        char.bold or char.italics or char.fg == "cyan" for char in emulator.styles_of("very imp")
    )


@pytest.mark.parametrize("rows", [24, 5])
def test_code_longer_than_the_screen_is_whole(rows):
    code = "\n".join(f"line_{number} = {number}" for number in range(100))
    emulator = Emulator(rows=rows)
    stream(cut(f"Before\n\n```python\n{code}\n```\n\nAfter\n", 1), emulator)
    assert [line.strip() for line in emulator.lines if line] == [
        "Before",
        *code.split("\n"),
        "After",
    ]


def test_a_paragraph_longer_than_the_screen_is_whole():
    text = " ".join(f"word{number}" for number in range(500))
    emulator = Emulator(80, 10)
    stream(cut(text, 2), emulator)
    assert emulator.text == text
    assert len(emulator.lines) > 40


def test_a_table_longer_than_the_screen_is_whole_though_its_columns_move():
    rows = "".join(
        f"| {number} | {'word ' * (number % 25)}{number} | {'x' * number} |\n"
        for number in range(40)
    )
    table = f"| n | text | more |\n|---|---|---|\n{rows}"
    at_once, in_pieces = Emulator(rows=1000), Emulator(rows=10)
    stream([table], at_once)
    frames = stream([*table.splitlines(keepends=True), "\nEnd"], in_pieces, watch=True)
    assert in_pieces.lines == [*at_once.lines, "", "End"]
    assert any("lines above" in frame for frame in frames)


def test_a_list_longer_than_the_screen_is_whole_though_its_numbers_grow():
    items = "".join(f"{number}. {'word ' * (number * 7 % 30)}{number}\n" for number in range(1, 30))
    at_once, in_pieces = Emulator(rows=1000), Emulator(rows=10)
    stream([items], at_once)
    stream(cut(items, 3), in_pieces)
    assert in_pieces.lines == at_once.lines


def test_only_what_changes_is_written():
    emulator = Emulator(80, 24)
    pieces = cut(" ".join(f"word{number}" for number in range(150)), 0)
    stream(pieces, emulator)
    assert (
        max(len(text) for text in emulator.written) < 300
    )  # not the twelve lines of the paragraph


def test_a_narrower_window_leaves_no_rests():
    emulator = Emulator(80, 24)
    region = Region(emulator, emulator.terminal.size)
    region.draw(["a" * 60, "b" * 60])
    emulator.terminal.console.size = (
        40,
        24,
    )  # the emulator does not wrap what is there: do it by hand
    emulator.screen.reset()
    emulator.write("a" * 40 + "\r\n" + "a" * 20 + "\r\n" + "b" * 40 + "\r\n" + "b" * 20)
    region.draw(["c" * 39, "d"])
    assert emulator.lines == ["c" * 39, "d"]


def test_regions_shrink_to_what_is_left():
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
    assert emulator.text == "before[2J]0;title after"
    assert emulator.screen.title == ""


def test_markup_of_html_is_text():
    emulator = Emulator()
    stream(["<div>block</div>\n\nand <b>inline</b>"], emulator)
    assert emulator.lines == ["<div>block</div>", "", "and <b>inline</b>"]


def test_lines_that_the_model_begins_are_lines():
    emulator = Emulator()
    stream(["Roses are red\nviolets are blue"], emulator)
    assert emulator.lines == ["Roses are red", "violets are blue"]


def test_code_blocks_are_found_for_the_clipboard():
    assert code_blocks(TOUR)[0].startswith("@dataclass\nclass Point:")
    assert code_blocks("none `here`") == []
