"""Markdown that is shown while it is written: finished blocks, and a draft of the last one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import (
    CodeBlock,
    Heading,
    HorizontalRule,
    ListElement,
    Markdown,
    TableElement,
    UnknownElement,
)
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

PROSE_WIDTH = 100  # columns; longer lines are hard to read. Code and tables take what there is
CODE_INDENT = 2

THEME = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold italic",
        "markdown.h4": "italic",
        "markdown.code": "cyan",
        "markdown.block_quote": "none",
        "markdown.item.number": "cyan",
        "markdown.item.bullet": "cyan",
        "markdown.link": "bold",
        "markdown.link_url": "underline",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
"""The terminal's own colors, and of those only what can be read on a dark and on a light background."""

CODE_THEME = ANSISyntaxTheme(
    {
        Comment: Style(dim=True, italic=True),
        Comment.Preproc: Style(color="magenta"),
        Keyword: Style(color="magenta"),
        Keyword.Type: Style(color="cyan"),
        Operator.Word: Style(color="magenta"),
        Name.Builtin: Style(color="cyan"),
        Name.Function: Style(color="blue", bold=True),
        Name.Class: Style(color="blue", bold=True),
        Name.Decorator: Style(color="cyan"),
        Name.Exception: Style(color="red"),
        Name.Tag: Style(color="magenta"),
        Name.Attribute: Style(color="cyan"),
        String: Style(color="green"),
        Number: Style(color="cyan"),
        Generic.Deleted: Style(color="red"),
        Generic.Inserted: Style(color="green"),
        Generic.Heading: Style(bold=True),
        Generic.Subheading: Style(color="cyan"),
    }
)

UNDECIDED = re.compile(
    r"""
      [-*+_=\#>:~`|\s]*     # a list, a rule, an underline, a heading, a quote, a fence, ...
    | \d{1,9}[.)]?\s*       # a numbered list
    | (?:`{3,}|~{3,}).*     # a fence, whose language is not complete
    | \|.*                  # a row of a table
    """,
    re.VERBOSE,
)
"""A last line without its end and indent that may become anything: to show it now would be to take it back."""
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
EMPHASIS = re.compile(r"\*\*|\*|~~")
OPEN_LINK = re.compile(r"!?\[[^\[\]]{0,100}(\](\([^()]{0,300})?)?$")
"""A link whose address is not complete."""


class Code(CodeBlock):
    """Without a background and without a frame, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        syntax = Syntax(
            code, self.lexer_name, theme=CODE_THEME, word_wrap=True, background_color="default"
        )
        yield Padding(syntax, (0, 0, 0, CODE_INDENT))


class LeftHeading(Heading):
    LEVEL_ALIGN = Heading.LEVEL_ALIGN | {"h1": "left"}


class SteadyList(ListElement):
    """Numbers have room for two digits from the first on, so that the tenth item moves no other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.list_type == "bullet_list_open":
            yield from super().__rich_console__(console, options)
            return
        first = self.list_start or 0
        last = max(first + len(self.items) - 1, 10)
        for number, item in enumerate(self.items, first):
            yield from item.render_number(console, options, number, last)


class Line(HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr")
        yield Text()


class PlainTable(TableElement):
    """Without edges; where cells wrap, rows are kept apart."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            table.show_edge = False
            natural = table.__rich_measure__(console, options.update(width=10_000)).maximum
            table.show_lines = natural > options.max_width
            yield table


class Rendered(Markdown):
    """Blocks, as rich renders them."""

    elements = Markdown.elements | {
        "fence": Code,
        "code_block": Code,
        "heading_open": LeftHeading,
        "hr": Line,
        "bullet_list_open": SteadyList,
        "ordered_list_open": SteadyList,
        "table_open": PlainTable,
    }

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)  # where a link leads is to be seen
        self.parsed = tokens


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a list, a table, ... `line` is where it begins."""

    tokens: list[Token]
    line: int

    @property
    def is_code(self) -> bool:
        return self.tokens[0].type in ("fence", "code_block")

    @property
    def is_table(self) -> bool:
        return self.tokens[0].type == "table_open"

    @property
    def is_wide(self) -> bool:
        return self.is_code or self.is_table

    @property
    def leaves_gap(self) -> bool:
        """Whether an empty line follows it."""
        return Rendered.elements.get(
            self.tokens[-1].type.replace("_close", "_open"), UnknownElement
        ).new_line


class MarkdownStream:
    """Markdown that comes in pieces. What a block becomes depends on what follows it only while it is the last, so that
    finished blocks can be taken out for good.

    A link whose address is defined further down than where it is used is shown as it is written.
    """

    def __init__(self) -> None:
        self.rest = ""
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
        self._definitions: dict[str, Any] = {}

    def feed(self, text: str) -> None:
        self.rest += text

    def take_finished(self) -> list[Block]:
        """Blocks that nothing can change any more, once each."""
        complete = self.rest[: self.rest.rfind("\n") + 1]
        env = {
            "references": self._definitions
        }  # of complete lines: what they define holds from there on
        *finished, last = self._blocks(complete, env) or [Block([], 0)]
        if finished:
            self.rest = "\n".join(self.rest.split("\n")[last.line :])
        return finished

    def take_rest(self) -> list[Block]:
        """What is left when nothing more comes."""
        text, self.rest = self.rest, ""
        return self._blocks(text, {"references": self._definitions})

    def draft(self) -> list[Block]:
        """What the rest looks like now: without an end that is undecided, and with what is open in it closed."""
        text = _decided(self.rest)
        blocks = self._blocks(text, {"references": dict(self._definitions)})
        if blocks and not blocks[-1].is_code and (closed := _closed(text)) != text:
            blocks = self._blocks(closed, {"references": dict(self._definitions)})
        return blocks

    def _blocks(self, text: str, env: dict[str, Any]) -> list[Block]:
        blocks: list[Block] = []
        for token in self._parser.parse(text, env):
            for child in token.children or ():
                if child.type == "softbreak":  # a line that the model began is a line
                    child.type = "hardbreak"
            if token.level == 0 and token.nesting >= 0:
                blocks.append(Block([], token.map[0] if token.map else 0))
            blocks[-1].tokens.append(token)
        return blocks


class BlockRenderer:
    """Blocks as lines of a terminal, with its escape codes and without line breaks."""

    def __init__(self, console: Console) -> None:
        """`console`: whose colors are used."""
        self._console = Console(
            file=StringIO(),
            force_terminal=console.is_terminal,
            color_system=console.color_system,  # type: ignore[arg-type]  # rich gives any text and takes some
            no_color=console.no_color,
            legacy_windows=False,
            theme=THEME,
            highlight=False,
        )

    def lines(self, blocks: Sequence[Block], columns: int, before: Block | None) -> list[str]:
        """The lines of blocks, after what ends with the block `before`."""
        lines: list[str] = []
        for block in blocks:
            shown = self.render(
                Rendered(block.tokens), columns if block.is_wide else min(columns, PROSE_WIDTH)
            )
            if not block.is_code and shown[:1] == [""]:
                del shown[
                    0
                ]  # rich puts an empty line before lists, quotes and tables, even before the first
            if shown and before is not None and before.leaves_gap:
                lines.append("")
            lines += shown
            before = block
        return lines

    def render(self, what: Any, columns: int) -> list[str]:
        """Anything that rich can print."""
        self._console.width = columns
        with self._console.capture() as captured:
            self._console.print(what)
        return [line.rstrip() for line in captured.get().split("\n")][:-1]


def _decided(text: str) -> str:
    """The text without what its next piece may turn into something else."""
    complete, newline, last = text.rpartition("\n")
    if UNDECIDED.fullmatch(last.lstrip()):
        last = ""
    lines = complete.split("\n")
    if lines[-1].startswith("|") and not (len(lines) > 1 and lines[-2].startswith("|")):
        complete, last = (
            "\n".join(lines[:-1]),
            "",
        )  # the head of a table, which the line below it makes one
    return complete + newline + OPEN_LINK.sub("", last).rstrip("*_~`")


def _closed(text: str) -> str:
    """The text with the code or the emphasis closed that its last paragraph leaves open."""
    paragraph = text.rpartition("\n\n")[2]
    outside = CODE_SPAN.sub("", paragraph)
    if ticks := re.search("`+", outside):
        return text + ticks[0]
    open_marks: list[str] = []
    for mark in EMPHASIS.finditer(outside):
        if mark[0] in open_marks and not outside[mark.start() - 1].isspace():
            del open_marks[open_marks.index(mark[0]) :]
        elif not outside[mark.end() : mark.end() + 1].isspace():
            open_marks.append(mark[0])
    return text.rstrip() + "".join(reversed(open_marks)) if open_marks else text


def code_blocks(text: str) -> list[str]:
    """The code in a text, block by block."""
    return [
        token.content for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"
    ]
