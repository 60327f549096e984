"""Streamed Markdown: finished blocks, and a draft of the last one."""

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

from toolkit.console import SafeConsole

PROSE_WIDTH = 100  # columns; longer lines are hard to read. Code and tables use the full width
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
)  # uses only those of the terminal's own colors that are readable on dark and light backgrounds

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
)  # matches a last line (without indent) whose meaning depends on the next characters
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
EMPHASIS = re.compile(r"\*\*|\*|~~")
OPEN_LINK = re.compile(r"!?\[[^\[\]]{0,100}(\](\([^()]{0,300})?)?$")
"""A link without a complete address, at the end."""


class PlainCode(CodeBlock):
    """Code without background or frame, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        syntax = Syntax(
            code, self.lexer_name, theme=CODE_THEME, word_wrap=True, background_color="default"
        )
        yield Padding(syntax, (0, 0, 0, CODE_INDENT))


class LeftHeading(Heading):
    LEVEL_ALIGN = Heading.LEVEL_ALIGN | {"h1": "left"}


class StableList(ListElement):
    """A list with room for two-digit numbers, so that the tenth item does not move the others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.list_type == "bullet_list_open":
            yield from super().__rich_console__(console, options)
            return
        first = self.list_start or 0
        last = max(first + len(self.items) - 1, 10)
        for number, item in enumerate(self.items, first):
            yield from item.render_number(console, options, number, last)


class PlainRule(HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr")
        yield Text()


class PlainTable(TableElement):
    """A table without edges, and with lines between rows if cells wrap."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            table.show_edge = False
            natural = table.__rich_measure__(console, options.update(width=10_000)).maximum
            table.show_lines = natural > options.max_width
            yield table


class RenderedBlocks(Markdown):
    """Parsed blocks, in the form that rich renders: set `parsed`. It is slow to construct."""

    elements = Markdown.elements | {
        "fence": PlainCode,
        "code_block": PlainCode,
        "heading_open": LeftHeading,
        "hr": PlainRule,
        "bullet_list_open": StableList,
        "ordered_list_open": StableList,
        "table_open": PlainTable,
    }

    def __init__(self) -> None:
        super().__init__("", hyperlinks=False)  # show the addresses of links


@dataclass(frozen=True, slots=True)
class MarkdownBlock:
    """A paragraph, list, table, ... that begins at `line`."""

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
    def has_gap_after(self) -> bool:
        """True if an empty line follows it."""
        return RenderedBlocks.elements.get(
            self.tokens[-1].type.replace("_close", "_open"), UnknownElement
        ).new_line


class MarkdownStream:
    """Parses Markdown as it arrives. All blocks but the last one are finished.

    A link whose address is defined below it is shown as it is written."""

    def __init__(self) -> None:
        self.rest = ""
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
        self._definitions: dict[str, Any] = {}

    def feed(self, text: str) -> None:
        self.rest += text

    def take_finished(self) -> list[MarkdownBlock]:
        """Return the blocks finished since the last call."""
        complete = self.rest[: self.rest.rfind("\n") + 1]
        # Links defined in complete lines stay defined.
        env = {"references": self._definitions}
        *finished, last = self._blocks(complete, env) or [MarkdownBlock([], 0)]
        if finished:
            self.rest = "\n".join(self.rest.split("\n")[last.line :])
        return finished

    def take_rest(self) -> list[MarkdownBlock]:
        """Return the remaining blocks, at the end of the text."""
        text, self.rest = self.rest, ""
        return self._blocks(text, {"references": self._definitions})

    def draft(self) -> list[MarkdownBlock]:
        """Return the unfinished blocks, without an undecided end and with open marks closed."""
        text = _drop_undecided(self.rest)
        blocks = self._blocks(text, {"references": dict(self._definitions)})
        if blocks and not blocks[-1].is_code and (closed := _close_marks(text)) != text:
            blocks = self._blocks(closed, {"references": dict(self._definitions)})
        return blocks

    def _blocks(self, text: str, env: dict[str, Any]) -> list[MarkdownBlock]:
        blocks: list[MarkdownBlock] = []
        for token in self._parser.parse(text, env):
            for child in token.children or ():
                if child.type == "softbreak":  # keep the line breaks of the model
                    child.type = "hardbreak"
            if token.level == 0 and token.nesting >= 0:
                blocks.append(MarkdownBlock([], token.map[0] if token.map else 0))
            blocks[-1].tokens.append(token)
        return blocks


class BlockRenderer:
    """Renders blocks as lines of a terminal, with escape codes."""

    def __init__(self, console: Console) -> None:
        """Use the colors of `console`."""
        self._console = SafeConsole(
            file=StringIO(),
            force_terminal=console.is_terminal,
            color_system=console.color_system,
            no_color=console.no_color,
            legacy_windows=False,
            theme=THEME,
        )
        self._blocks = RenderedBlocks()

    def lines(
        self, blocks: Sequence[MarkdownBlock], columns: int, before: MarkdownBlock | None
    ) -> list[str]:
        """Render blocks that follow the block `before`."""
        lines: list[str] = []
        for block in blocks:
            self._blocks.parsed = block.tokens
            shown = self.render(
                self._blocks, columns if block.is_wide else min(columns, PROSE_WIDTH)
            )
            if not block.is_code and shown[:1] == [""]:
                del shown[0]  # rich puts an empty line before every list, quote and table
            if shown and before is not None and before.has_gap_after:
                lines.append("")
            lines += shown
            before = block
        return lines

    def render(self, renderable: Any, columns: int) -> list[str]:
        """Render anything that rich can print."""
        self._console.width = columns
        with self._console.capture() as captured:
            self._console.print(renderable)
        return [line.rstrip() for line in captured.get().split("\n")][:-1]


def _drop_undecided(text: str) -> str:
    """Remove the end of the text if its meaning depends on the next characters."""
    complete, newline, last = text.rpartition("\n")
    if UNDECIDED.fullmatch(last.lstrip()):
        last = ""
    lines = complete.split("\n")
    if lines[-1].startswith("|") and not (len(lines) > 1 and lines[-2].startswith("|")):
        # Maybe the head of a table: the next line decides.
        complete, last = "\n".join(lines[:-1]), ""
    return complete + newline + OPEN_LINK.sub("", last).rstrip("*_~`")


def _close_marks(text: str) -> str:
    """Close code and emphasis that are open at the end of the last paragraph."""
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
    """Return the fenced code blocks of a text."""
    return [
        token.content for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"
    ]
