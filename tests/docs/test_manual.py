"""The man pages say what the program has, no more and no less, and read well in groff and without it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_completions import COMMANDS
from toolkit.cli.help import known_settings, settings_of
from toolkit.cli.man import page_name
from toolkit.cli.roff import as_text
from toolkit.cli.root import tree
from toolkit.config.sources import FILE_VARIABLE
from toolkit.errors import ConfigError
from toolkit.logs import DEBUG
from toolkit.metrics import Metrics
from tools.docs import everything
from tools.docs.prose import PROSE

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "man").iterdir())
SECTIONS = (
    "NAME",
    "SYNOPSIS",
    "DESCRIPTION",
    "OPTIONS",
    "EXAMPLES",
    "ENVIRONMENT",
    "EXIT STATUS",
    "FILES",
    "SEE ALSO",
)
TITLE = re.compile(r'^\.SH "(.*)"$', re.MULTILINE)


def text_of(name: str) -> str:
    return as_text((ROOT / "man" / name).read_text())


def section(page: str, title: str) -> str:
    """One section of a page as text, on one line."""
    return " ".join(
        re.split(r"^(?=\S)", text_of(page).split(f"\n{title}\n")[1], flags=re.MULTILINE)[0].split()
    )


def test_what_is_committed_is_what_make_docs_makes():
    made = everything()
    committed = {
        f"{folder}/{path.name}": path.read_text()
        for folder in ("man", "completions")
        for path in (ROOT / folder).iterdir()
    }
    assert committed.keys() == made.keys()
    stale = [name for name in made if made[name] != committed[name]]
    assert not stale, "run `make docs`"


@pytest.mark.parametrize(
    ("path", "flags"),
    COMMANDS,
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_every_command_has_a_page_with_its_flags_and_variables(path, flags):
    page = f"{'-'.join(path)}.1"
    titles = TITLE.findall((ROOT / "man" / page).read_text())
    assert [title for title in titles if title in SECTIONS] == list(SECTIONS)
    entries = re.findall(r"^ {7}(-.*)$", text_of(page), re.MULTILINE)
    assert {
        flag for entry in entries for flag in re.findall(r"(?:^|, )(--?[\w-]+)", entry)
    } == flags
    command = tree()
    for name in path[1:]:
        command = command.commands[name]
    variables = set(re.findall(r"TK_[A-Z_]+", section(page, "ENVIRONMENT")))
    settings = {row.variable for row in settings_of(command).values()}
    assert variables - {DEBUG, FILE_VARIABLE} == settings
    assert FILE_VARIABLE in variables or not settings
    assert DEBUG in variables


def test_the_servers_page_lists_every_endpoint():
    listed = section("tk-serve.1", "ENDPOINTS")
    sources = "".join(path.read_text() for path in (ROOT / "toolkit" / "api").rglob("*.py"))
    routes = re.findall(r'@router\.(get|post|delete|put)\(\s*"([^"]+)"', sources)
    assert len(routes) > 20
    for method, path in routes:
        assert re.search(
            rf"\b[A-Z, ]*{method.upper()}[A-Z, ]* {re.escape(path.replace(':path', ''))} ", listed
        ), path


def test_the_files_page_has_every_setting():
    keys = re.findall(r"^ {7}([a-z_]+) \(", text_of("tk.toml.5"), re.MULTILINE)
    assert sorted(keys) == sorted(
        {name for names in known_settings(tree()).values() for name in names}
    )


def test_the_metrics_page_has_every_metric_with_its_type():
    page = section("tk-metrics.7", "METRICS")
    exposed = re.findall(
        r"^# TYPE (\S+) (\w+)$", Metrics("tk", "m").expose().decode(), re.MULTILINE
    )
    assert len(exposed) > 30
    for name, kind in exposed:
        if not name.endswith("_created"):
            assert f"{name} {kind.capitalize()}" in page


@pytest.mark.parametrize(
    "line",
    [line for prose in PROSE.values() for _, lines in prose.examples for line in lines.split("\n")],
)
def test_examples_are_command_lines_that_tk_takes(line: str):
    words = shlex.split(line.replace("<(", "").replace(")", ""))
    while (arguments := words[words.index("tk") + 1 :]) and "tk" in arguments:
        words = arguments
    command = tree()
    context = command.make_context("tk", list(arguments))
    while context._protected_args:
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_groff_has_nothing_to_complain_of(page: Path):
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", page], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_without_groff_a_page_reads_the_same(page: Path):
    """The words are those that groff prints, but for its headers and footers."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    printed = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-c", "-P-b", "-P-u", "-rHY=0", "-rLL=1000n", page],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    theirs = printed.split("\n", 1)[1].rsplit("\n", 2)[0]
    assert as_text(page.read_text()).split() == " ".join(theirs.splitlines()[:-1]).split()


class TestCommand:
    """`tk man`."""

    @staticmethod
    def run(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "toolkit", "man", *arguments],
            env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def test_it_shows_the_page_of_a_command_also_where_man_is_missing(self, tmp_path):
        done = self.run("bench", "offline", path=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == text_of("tk-bench-offline.1")

    def test_it_leaves_the_reading_to_man_where_there_is_one(self, tmp_path):
        (tmp_path / "man").write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
        (tmp_path / "man").chmod(0o755)
        done = self.run("metrics", path=f"{tmp_path}:/usr/bin:/bin")
        assert done.stdout == f"<{ROOT / 'man' / 'tk-metrics.7'}>"

    def test_pages_are_found_by_what_they_are_about(self):
        assert page_name([]) == "tk.1"
        assert page_name(["serve"]) == page_name(["tk-serve"]) == "tk-serve.1"
        assert page_name(["tk.toml"]) == "tk.toml.5"
        with pytest.raises(ConfigError, match="Did you mean tk-serve"):
            page_name(["srve"])
