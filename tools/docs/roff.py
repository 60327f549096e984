"""Man pages in roff: the few macros that groff's and mandoc's `man` understand alike."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.version import __version__


def escape(text: str) -> str:
    """Text as it is to be read: hyphens that can be copied, no line taken for a macro."""
    escaped = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    )
    escaped = escaped.replace("^", "\\(ha").replace("~", "\\(ti")
    lines = (f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.split("\n"))
    return "\n".join(lines)


def bold(text: str) -> str:
    return f"\\fB{escape(text)}\\fR"


def italic(text: str) -> str:
    return f"\\fI{escape(text)}\\fR"


class Page:
    """A page that is being written, from its title line on."""

    def __init__(self, name: str, section: int, summary: str) -> None:
        self._lines = [
            f'.TH {escape(name.upper())} {section} "" "tk {__version__}" "tk manual"',
            '.SH "NAME"',
            f"{escape(name)} \\- {escape(summary)}",
        ]

    def section(self, title: str) -> None:
        self._lines.append(f'.SH "{escape(title)}"')

    def subsection(self, title: str) -> None:
        self._lines.append(f'.SS "{escape(title)}"')

    def paragraph(self, text: str) -> None:
        """One whose text is roff already."""
        after_title = self._lines[-1].startswith((".SH", ".SS"))
        self._lines += [text] if after_title else [".PP", text]

    def text(self, text: str) -> None:
        """Paragraphs of plain text, parted by empty lines."""
        for part in text.split("\n\n"):
            self.paragraph(escape(" ".join(part.split())))

    def item(self, tag: str, text: str) -> None:
        """A tag, in roff, and the plain text beside it."""
        self._lines += [".TP", tag, escape(text)]

    def items(self, rows: Iterable[tuple[str, str]]) -> None:
        """Plain words, set bold, and what they mean."""
        for word, text in rows:
            self.item(bold(word), text)

    def code(self, text: str) -> None:
        """Lines that stay as they are, behind a paragraph or a title."""
        if not self._lines[-1].startswith(".SH"):
            self._lines.append(".PP")
        self._lines += [".RS 4", ".EX", escape(text), ".EE", ".RE"]

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"
