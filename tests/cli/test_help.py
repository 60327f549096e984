"""Help that fits a screen, and what becomes of a command line with a mistake in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cli.names import COMMANDS
from toolkit.cli.root import tree
from toolkit.doctor.shipped import COMPLETIONS

ROOT = Path(__file__).parents[2]


def paths_of(command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of a command and of all below it."""
    below = getattr(command, "commands", {})
    return [path, *(one for name in below for one in paths_of(below[name], (*path, name)))]


@pytest.fixture
def tk(tk_here: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """On a terminal that is 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    return tk_here


@pytest.mark.parametrize("command", paths_of(tree()), ids=" ".join)
def test_help_fits_a_terminal_of_80_by_24_with_the_prompt(tk: Callable, command: tuple[str, ...]):
    done = tk(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80


def test_the_programs_help_has_every_command_once_with_what_it_does(tk: Callable):
    lines = [
        line.split(maxsplit=1) for line in tk("--help").stdout.splitlines() if line.startswith("  ")
    ]
    assert tuple(name for name, _ in lines) == COMMANDS
    assert all(text[0].isupper() and not text.endswith(("...", ".")) for _, text in lines)


def test_help_shows_common_settings_by_subject_and_help_all_the_rest(tk: Callable):
    short, whole = tk("serve", "--help").stdout, tk("serve", "--help-all").stdout
    assert "tk serve --help-all" in short
    for text in (short, whole):
        assert (
            text.index("Model:")
            < text.index("--max-model-len")
            < text.index("Listening:")
            < text.index("--port")
        )
    assert "--uvicorn-log-level" not in short
    assert whole.index("Metrics, log and traces:") < whole.index("--uvicorn-log-level")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("srve", "serve"),
        ("bench ofline", "offline"),
        ("serve --prot 3", "--port"),
        ("serve --no-enable-prefix-cache", "--no-enable-prefix-caching"),
        ("chat --sytem=x", "--system"),
    ],
)
def test_what_was_meant_is_named_on_one_line(tk: Callable, line: str, meant: str):
    done = tk(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Did you mean {meant}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "line", ["serve --port", "serve --port x", "serve a b", "completion fsh", "zzz"]
)
def test_other_mistakes_are_one_line_too(tk: Callable, line: str):
    done = tk(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tk: ")
    assert done.stderr.count("\n") == 1


def test_without_a_command_the_help_goes_to_stderr_as_a_mistake(tk: Callable):
    done = tk()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == tk("--help").stdout


def test_the_version_needs_no_command_line_library():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['tk', '--version']; from toolkit.cli import main; main(); print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    version, modules = done.stdout.splitlines()
    assert version.startswith("tk 0.")
    assert not {"typer", "torch", "transformers", "textual", "pydantic"} & set(modules.split())


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_a_completion_script_is_printed_or_installed(tk: Callable, shell: str, tmp_path: Path):
    script = (ROOT / "completions" / COMPLETIONS[shell]).read_text()
    assert tk("completion", shell).stdout == script
    environment = {
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": "",
        "XDG_CONFIG_HOME": "",
        "ZDOTDIR": "",
        "BASH_COMPLETION_USER_DIR": "",
    }
    done = tk("completion", shell, "--install", **environment)
    assert done.returncode == 0, done.stderr
    (installed,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert installed.read_text() == script
    assert str(installed) in done.stdout
