"""House style, as far as a program can check it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED = ("toolkit", "kernels", "tools")
PACKAGES = sorted(
    {
        str(
            path.relative_to(ROOT).parent
            if path.parent.name in CHECKED
            else Path(*path.relative_to(ROOT).parts[:2])
        )
        for folder in (*CHECKED, "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
)

STARTS = re.compile(
    r"(What|Of|Where|How|Whether|Who|Which|That|As|Also|Same|The same|Like|And|But|It|They)\b"
)
"""A docstring starts with a verb, or with the thing itself."""
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


def files(package: str) -> list[Path]:
    """Return the Python files of a package, or those directly in a top folder."""
    folder = ROOT / package
    if folder.is_file():
        return [folder]
    return sorted(folder.glob("*.py") if "/" not in package else folder.rglob("*.py"))


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


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_start_with_a_verb_or_the_thing(package: str):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in files(package)
        for line, text in docstrings(ast.parse(path.read_text()))
        if STARTS.match(text.lstrip())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_prose_has_no_coined_words(package: str):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in "
        f"{text[max(0, found.start() - 30) : found.end() + 30]!r}"
        for path in files(package)
        if path != Path(__file__) and str(path.relative_to(ROOT)) not in DATA
        for line, text in prose(path.read_text())
        for found in AVOIDED.finditer(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_lines_end_at_100_columns(package: str):
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in files(package)
        if str(path.relative_to(ROOT)) not in DATA
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > COLUMNS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [one for one in PACKAGES if one.startswith("tests")])
def test_names_of_tests_are_short(package: str):
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in files(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > 64
    ]
    assert not wrong, "\n".join(wrong)
