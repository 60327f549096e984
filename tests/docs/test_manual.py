"""The man pages match the program, and are readable with and without groff."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_completions import COMMANDS
from toolkit.cli.commands.man import page_name
from toolkit.cli.help import known_settings, settings_of
from toolkit.cli.roff import as_text
from toolkit.cli.root import tree
from toolkit.config.sources import FILE_VARIABLE
from toolkit.errors import ConfigError
from toolkit.logs import DEBUG
from toolkit.metrics import Metrics
from tools.docs import FOLDERS, generate
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
    """Return one section of a page as text, on one line."""
    following = text_of(page).split(f"\n{title}\n")[1]
    return " ".join(re.split(r"^(?=\S)", following, flags=re.MULTILINE)[0].split())


def test_committed_pages_are_up_to_date():
    generated = generate()
    committed = {
        f"{folder}/{path.name}": path.read_text()
        for folder, kind in FOLDERS
        for path in (ROOT / folder).glob(kind)
    }
    assert committed.keys() == generated.keys()
    stale = [name for name in generated if generated[name] != committed[name]]
    assert not stale, "run `make docs`"


@pytest.mark.parametrize(
    ("path", "flags"),
    COMMANDS,
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_all_commands_have_a_page_with_flags_and_variables(path, flags):
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


def test_the_page_of_tk_serve_lists_every_endpoint():
    listed = section("tk-serve.1", "ENDPOINTS")
    sources = "".join(path.read_text() for path in (ROOT / "toolkit" / "api").rglob("*.py"))
    routes = re.findall(r'@router\.(get|post|delete|put)\(\s*"([^"]+)"', sources)
    assert len(routes) > 20
    for method, path in routes:
        assert re.search(
            rf"\b[A-Z, ]*{method.upper()}[A-Z, ]* {re.escape(path.replace(':path', ''))} ", listed
        ), path


def test_the_page_of_the_settings_file_has_every_setting():
    keys = re.findall(r"^ {7}([a-z_]+) \(", text_of("tk.toml.5"), re.MULTILINE)
    assert sorted(keys) == sorted(
        {name for names in known_settings(tree()).values() for name in names}
    )


def test_the_page_of_metrics_has_every_metric_with_its_type():
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
def test_examples_are_valid_command_lines(line: str):
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
def test_groff_reports_no_problem(page: Path):
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", page], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_text_without_groff_has_the_same_words(page: Path):
    """Except for headers and footers, which only groff prints."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    printed = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-c", "-P-b", "-P-u", "-rHY=0", "-rLL=1000n", page],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    body = printed.split("\n", 1)[1].rsplit("\n", 2)[0]
    assert as_text(page.read_text()).split() == " ".join(body.splitlines()[:-1]).split()


class TestCommand:
    """`tk man`."""

    def test_a_page_is_shown_without_man(self, tmp_path, tk_here):
        done = tk_here("man", "bench", "offline", PATH=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == text_of("tk-bench-offline.1")

    def test_man_shows_the_page_if_it_is_installed(self, tmp_path):
        (tmp_path / "man").write_text('#!/bin/sh\nprintf "<%s>" "$@"\nkill -PIPE $$\n')
        (tmp_path / "man").chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", "man", "metrics"],
            env=os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout == f"<{ROOT / 'man' / 'tk-metrics.7'}>"
        assert done.returncode == -signal.SIGPIPE  # `tk man | head` ends it without a message

    def test_pages_are_found_by_their_names(self):
        assert page_name([]) == "tk.1"
        assert page_name(["serve"]) == page_name(["tk-serve"]) == "tk-serve.1"
        assert page_name(["tk.toml"]) == "tk.toml.5"
        with pytest.raises(ConfigError, match="Did you mean tk-serve"):
            page_name(["srve"])
