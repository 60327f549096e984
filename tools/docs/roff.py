"""Man pages in roff, with the macros that both groff and mandoc support."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.version import __version__


def escape(text: str) -> str:
    """Escape text: hyphens stay copyable, and no line is read as a macro."""
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


class ManPage:
    """A man page under construction."""

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
        """Add a paragraph that is already roff."""
        after_title = self._lines[-1].startswith((".SH", ".SS"))
        self._lines += [text] if after_title else [".PP", text]

    def text(self, text: str) -> None:
        """Add paragraphs of plain text, separated by empty lines."""
        for part in text.split("\n\n"):
            self.paragraph(escape(" ".join(part.split())))

    def item(self, tag: str, text: str) -> None:
        """Add a tag in roff with a plain description."""
        self._lines += [".TP", tag, escape(text)]

    def items(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add plain terms, set bold, with their descriptions."""
        for term, text in rows:
            self.item(bold(term), text)

    def code(self, text: str) -> None:
        """Add lines that are not filled, after a paragraph or a title."""
        if not self._lines[-1].startswith(".SH"):
            self._lines.append(".PP")
        self._lines += [".RS 4", ".EX", escape(text), ".EE", ".RE"]

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"
