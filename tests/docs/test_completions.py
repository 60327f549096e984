"""The completion scripts: results in bash, and syntax in every shell."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import until
from toolkit.cli.root import tree
from toolkit.cli.vllm import rules_of
from toolkit.config.vllm import Use

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "completions"
BREAKS = re.compile(r"[:=]|[^\s:=]+")
"""Splits a word as readline does for COMP_WORDS."""

DRIVER = """
source "$SCRIPT"
COMP_LINE=$1 COMP_POINT=${#1}
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_tk
((${#COMPREPLY[@]})) && printf '%s\\n' "${COMPREPLY[@]}"
exit 0
"""

PROGRAM = """#!/bin/sh
[ "$1" = __values ] && exec "{python}" -m toolkit "$@"
printf 'ran'; printf ' <%s>' "$@"
"""
"""Fake `tk`: prints its arguments, except for `tk __values`, which is real."""


def commands(
    command=None, path: tuple[str, ...] = ("tk",)
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Yield (path, flags) of every command, from Typer's objects."""
    command = command or tree()
    flags = {
        name
        for param in command.params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    yield path, flags | {"-h", "--help"}
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, (*path, name))


COMMANDS = list(commands())


@pytest.fixture
def complete(tmp_path: Path):
    """Return a function that returns bash's completions at the end of a line."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tk").write_text(PROGRAM.format(python=sys.executable))
    (tmp_path / "bin" / "tk").chmod(0o755)
    (tmp_path / "here").mkdir()
    others = ("TK_", "HF_", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "SCRIPT": str(FOLDER / "tk.bash"),
    }

    def run(line: str) -> list[str]:
        words = BREAKS.findall(line) + [""] * (line[-1] in " =:")
        done = subprocess.run(
            ["bash", "--norc", "-c", DRIVER, "driver", line, *words],
            cwd=tmp_path / "here", env=environment,
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.splitlines()

    run.folder, run.environment = tmp_path / "here", environment
    return run


@pytest.mark.parametrize(
    ("path", "flags"),
    COMMANDS,
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_every_flag_is_offered_in_every_shell(complete, path, flags):
    flags = flags | {
        name
        for name, rule in rules_of(" ".join(path[1:])).items()
        if name.startswith("--") and isinstance(rule.outcomes.get(""), Use)
    }
    assert set(complete(f"{' '.join(path)} -")) == flags
    zsh = re.search(
        rf"^_{'_'.join(path)}\(\) {{$(.*?)^}}$",
        (FOLDER / "_tk").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert {
        name.rstrip("=")
        for name in re.findall(r"^ +'[^-']*(?:\([^)]*\))?(-[\w-]+=?)\[", zsh[1], re.MULTILINE)
    } == flags
    lines = [
        line
        for line in (FOLDER / "tk.fish").read_text().splitlines()
        if f"\"__tk_at '{' '.join(path)}'\"" in line
    ]
    fish = {
        ("--" if dash == "l" else "-") + name
        for line in lines
        for dash, name in re.findall(r" -([ls]) ([\w-]+)", line.split(" -d '")[0])
    }
    assert fish == flags


def test_commands_and_subcommands_are_offered(complete):
    assert set(complete("tk ")) == {path[1] for path, _ in COMMANDS if len(path) == 2}
    assert complete("tk be") == ["bench"]
    assert set(complete("tk bench ")) == {
        path[2] for path, _ in COMMANDS if path[:2] == ("tk", "bench") and len(path) == 3
    }
    assert "offline" in complete("tk man bench o")


def test_choices_are_offered_after_a_flag_and_equals_sign(complete):
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    assert complete("tk serve --dtype ") == dtypes
    assert complete("tk serve gpt2 --port 80 --dtype f") == ["float32", "float16"]
    assert complete("tk bench offline --dtype=") == dtypes
    assert complete("tk serve --dtype=b") == ["bfloat16"]
    assert complete("tk completion ") == ["bash", "zsh", "fish"]


def test_values_without_a_list_offer_nothing(complete):
    assert complete("tk serve --port ") == []
    assert complete("tk run gpt2 ") == []
    assert complete("tk serve --no-such-flag") == []


def test_files_and_folders_are_offered(complete):
    (complete.folder / "keys.txt").touch()
    (complete.folder / "models").mkdir()
    assert complete("tk serve --api-key-file ke") == ["keys.txt"]
    assert complete("tk serve ./mo") == ["./models"]


def test_local_models_are_offered_even_with_colons_in_names(complete):
    """readline replaces only the text after the last colon, so only that is offered."""
    for name in ("tiny", "qwen3:0.6b", "qwen3:8b"):
        (complete.folder / name).mkdir()
        (complete.folder / name / "config.json").touch()
    assert set(complete("tk serve ")) == {"tiny", "qwen3:0.6b", "qwen3:8b"}
    assert complete("tk serve qw") == ["qwen3:0.6b", "qwen3:8b"]
    assert complete("tk serve qwen3:") == ["0.6b", "8b"]
    assert complete("tk run --model=qwen3:0") == ["0.6b"]


def test_models_of_the_server_in_the_line_are_offered(complete, httpserver):
    for line in (f"tk bench --url {httpserver} --model ", f"tk chat --base-url={httpserver} "):
        # Completion gives up after half a second, which a busy machine may need.
        assert until(lambda line=line: complete(line)) == ["org/model:tag"]
    assert complete("tk bench --url http://127.0.0.1:9 --model ") == []


def test_only_downloaded_models_are_offered_for_removal(complete):
    (complete.folder / "local").mkdir()
    (complete.folder / "local" / "config.json").touch()
    cache = complete.folder.parent / ".cache" / "huggingface" / "hub"
    (cache / "models--org--tiny").mkdir(parents=True)
    (cache / "models--gpt2").mkdir()
    assert set(complete("tk rm ")) == {"gpt2", "org/tiny"}
    assert complete("tk rm gpt2 --yes org/") == ["org/tiny"]
    assert set(complete("tk show ")) == {"gpt2", "local", "org/tiny"}


def test_commands_pages_and_settings_files_are_offered(complete):
    assert complete("tk config ") == ["show"]
    assert "serve" in complete("tk config show --command ")
    assert complete("tk man collect") == ["collect-env"]
    (complete.folder / "other.toml").touch()
    assert complete("tk serve --config ot") == ["other.toml"]


def test_an_interactive_bash_completes_a_value_with_a_colon(complete):
    (complete.folder / "qwen3:8b").mkdir()
    (complete.folder / "qwen3:8b" / "config.json").touch()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(complete.folder)
        os.execvpe(
            "bash",
            ["bash", "--norc", "--noprofile", "-i"],
            complete.environment | {"TERM": "dumb", "PS1": "$ "},
        )
    try:
        os.write(terminal, b'source "$SCRIPT"\n')
        os.write(terminal, b"tk serve --dtype=bf\t--model qwen3:\t\n")
        output, deadline = "", time.monotonic() + 90
        while "ran <" not in output and time.monotonic() < deadline:
            output += os.read(terminal, 4096).decode()
        assert "ran <serve> <--dtype=bfloat16> <--model> <qwen3:8b>" in output
    finally:
        os.write(terminal, b"exit\n")
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("shell", "name"), [("bash", "tk.bash"), ("zsh", "_tk"), ("fish", "tk.fish")]
)
def test_every_shell_parses_its_script(shell: str, name: str):
    if shutil.which(shell) is None and shell != "bash":
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", FOLDER / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
