"""House style, as far as a program can check it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("toolkit", "kernels", "tools", "tests")
    for path in (ROOT / folder).rglob("*.py")
]

STARTS = re.compile(
    r"(What|Of|Where|How|Whether|Who|Which|That|As|Also|Same|The same|Like|And|But|It|They)\b"
)
"""A docstring starts with a verb, or with the thing itself."""
QUOTED_STARTS = re.compile(r"""["'](?:\s|\\n|\\\n)*""" + STARTS.pattern)
"""Source with a string that starts so. Only that is parsed: it takes time."""
AVOIDED = re.compile(
    r"\b(beside|anew|likewise|nobody|in vain|to mend|be mended|mends?|tells?|told|telling|"
    r"a fault of tk|goes on with|going on with|of one's own|of its own accord|"
    r"lineup|line up|lines up)\b",
    re.IGNORECASE,
)
"""Words of STYLE.md's list that have no other use here."""
DATA = {f"tools/demo/{name}.py" for name in ("elsewhere", "frames", "invent", "words")}
"""Training data of the demo model: any words, and lines of any length."""
COLUMNS = 100


def sources() -> Iterator[tuple[str, str]]:
    """Yield (name, source) of all Python files."""
    for path in sorted(FILES):
        yield str(path.relative_to(ROOT)), path.read_text()


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, also of those below attributes and constants."""
    for node in ast.walk(tree):
        for statement in body if isinstance(body := getattr(node, "body", None), list) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments and strings."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def test_docstrings_start_with_a_verb_or_the_thing():
    wrong = [
        f"{name}:{line}: {text[:60]}"
        for name, source in sources()
        if QUOTED_STARTS.search(source)
        for line, text in docstrings(ast.parse(source))
        if STARTS.match(text.lstrip())
    ]
    assert not wrong, "\n".join(wrong)


def test_prose_has_no_coined_words():
    wrong = [
        f"{name}:{line}: {found[0]!r} in {text[max(0, found.start() - 30) : found.end() + 30]!r}"
        for name, source in sources()
        if name not in DATA | {"tests/test_style.py"} and AVOIDED.search(source)
        for line, text in prose(source)
        for found in AVOIDED.finditer(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_lines_end_at_100_columns():
    wrong = [
        f"{name}:{number}: {len(line)} columns"
        for name, source in sources()
        if name not in DATA
        for number, line in enumerate(source.splitlines(), start=1)
        if len(line) > COLUMNS
    ]
    assert not wrong, "\n".join(wrong)


def test_names_of_tests_are_short():
    wrong = [
        f"{name}: {test}"
        for name, source in sources()
        if name.startswith("tests/")
        for test in re.findall(r"\bdef (test_\w+)\(", source)
        if len(test) > 64
    ]
    assert not wrong, "\n".join(wrong)
