"""Man pages as plain text, for machines without `man`. Knows the macros of `tools.docs.roff`."""

import re
import textwrap

WIDTH = 78
INDENT = 7
TAG_INDENT = 14

_ESCAPES = {
    "\\e": "\\",
    "\\-": "-",
    "\\(aq": "'",
    "\\(ga": "`",
    "\\(ha": "^",
    "\\(ti": "~",
    "\\&": "",
}
_ESCAPE = re.compile(r"\\f[BIR]|\\\((?:aq|ga|ha|ti)|\\[-e&]")


def as_text(roff: str) -> str:
    """Render a page in 78 columns. Words that are longer are not broken."""
    out: list[str] = []
    indent = INDENT
    is_verbatim = is_tag = False
    for line in roff.splitlines():
        macro, _, rest = line.partition(" ")
        if not line.startswith("."):
            text = _plain(line)
            if is_verbatim:
                out.append(" " * (INDENT + 4) + text)
            elif is_tag:
                out += ["", *_filled(text, INDENT)]
                is_tag = False
            else:
                out += _filled(text, indent)
        elif macro in (".SH", ".SS"):
            out += ["", (" " * 3 if macro == ".SS" else "") + _plain(rest.strip('"'))]
            indent = INDENT
        elif macro == ".PP":
            out.append("")
            indent = INDENT
        elif macro == ".TP":
            is_tag, indent = True, TAG_INDENT
        elif macro in (".EX", ".EE"):
            is_verbatim = macro == ".EX"
    return "\n".join(out).strip("\n") + "\n"


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPES.get(match[0], ""), text)


def _filled(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
