"""Help on one screen, usage errors on one line, version and completion scripts."""

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
    """Return the words of a command and of its subcommands."""
    commands = getattr(command, "commands", {})
    return [path, *(one for name in commands for one in paths_of(commands[name], (*path, name)))]


@pytest.fixture
def tk(tk_here: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run tk with 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return tk_here


@pytest.mark.parametrize("command", paths_of(tree()), ids=" ".join)
def test_help_fits_a_terminal_of_80_by_24(tk: Callable, command: tuple[str, ...]):
    done = tk(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 23  # and the shell's prompt
    assert max(map(len, lines)) <= 80


def test_help_of_tk_lists_every_command_once(tk: Callable):
    rows = tk("--help").stdout.partition("\n\n")[0].splitlines()[1:]
    lines = [row[9:].split(maxsplit=1) for row in rows]
    assert tuple(name for name, _ in lines) == COMMANDS
    assert all(text[0].isupper() and not text.endswith(("...", ".")) for _, text in lines)


def test_help_lists_common_settings_and_help_all_the_rest(tk: Callable):
    short, complete = tk("serve", "--help").stdout, tk("serve", "--help-all").stdout
    assert "tk serve --help-all" in short
    for text in (short, complete):
        assert (
            text.index("Model:")
            < text.index("--max-model-len")
            < text.index("Listening:")
            < text.index("--port")
        )
    assert "--uvicorn-log-level" not in short
    assert complete.index("Metrics, log and traces:") < complete.index("--uvicorn-log-level")


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("srve", "serve"),
        ("bench ofline", "offline"),
        ("serve --prot 3", "--port"),
        ("serve --no-enable-prefix-cache", "--no-enable-prefix-caching"),
        ("chat --sytem=x", "--system"),
        ("serve --gpu-memory 1", "--gpu-memory-utilization"),
    ],
)
def test_usage_error_suggests_the_nearest_name(tk: Callable, line: str, suggestion: str):
    done = tk(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Did you mean {suggestion}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "verify"])
def test_usage_error_suggests_no_distant_name(tk: Callable, command: str):
    done = tk(command, "--lora-modules", "x")
    assert "Unknown flag --lora-modules" in done.stderr
    assert "Did you mean" not in done.stderr


@pytest.mark.parametrize(
    ("line", "evidence"),
    [
        ("serve --model a b", "MODEL is given twice: --model a and b."),
        ("chat --model a b c", "MODEL is given twice: --model a and b."),
        ("top --url http://me:secret@a b", "URL is given twice: --url http://***@a and b."),
        ("bench compare --after c a b", "B is given twice: --after c and b."),
    ],
)
def test_setting_given_twice_is_a_usage_error(tk: Callable, line: str, evidence: str):
    done = tk(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tk: {evidence} Leave one out.\n"


@pytest.mark.parametrize(
    "line", ["serve --port", "serve --port x", "serve a b", "completion fsh", "zzz"]
)
def test_usage_errors_are_one_line(tk: Callable, line: str):
    done = tk(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tk: ")
    assert done.stderr.count("\n") == 1


def test_a_server_has_one_model(tk: Callable):
    done = tk("serve", "a", "b", "c")
    assert done.stderr.startswith("tk: A server has one model; also given: b c. Start a server for")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run tk-demo What is TTFT", "Put the prompt in quotes; it is followed by: is TTFT."),
        ("stop a b", "tk stop does not take these arguments: b."),
    ],
)
def test_more_arguments_are_an_error_that_names_them(tk: Callable, line: str, message: str):
    assert tk(*line.split()).stderr == f"tk: {message}\n"


def test_tk_without_a_command_prints_help_to_stderr(tk: Callable):
    done = tk()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == tk("--help").stdout


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("help", "--help"),
        ("help bench sweep", "bench sweep --help"),
        ("list --json", "models --json"),
    ],
)
def test_alias_is_another_command(tk: Callable, line: str, same: str):
    done, expected = tk(*line.split()), tk(*same.split())
    assert done.stdout
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)


def test_help_of_an_unknown_command_is_an_error(tk: Callable):
    assert tk("help", "srve").stderr == "tk: Unknown command 'srve' of 'tk'. Did you mean serve?\n"


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version_imports_no_command_line_library(word: str):
    code = (
        f"import sys; sys.argv = ['tk', '{word}']; from toolkit.cli import main; main()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, modules = done.stdout.splitlines()
    assert version.startswith("tk 0.")
    assert not {"typer", "torch", "transformers", "textual", "pydantic"} & set(modules.split())


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_completion_script_is_printed_or_installed(tk: Callable, shell: str, tmp_path: Path):
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
