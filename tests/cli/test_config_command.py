"""`tk config show`: what is in force, who says so, and nothing secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from toolkit.cli.help import known_settings
from toolkit.cli.root import tree
from toolkit.config import SchedulerConfig, ServerConfig


@pytest.fixture
def show(tmp_path: Path):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TK_")}
        return subprocess.run(
            [sys.executable, "-m", "toolkit", "config", "show", *arguments], cwd=tmp_path,
            env=kept | {"HOME": str(tmp_path)} | environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


def test_it_is_a_file_that_tk_reads_and_that_changes_nothing(show, tmp_path):
    """Every setting of every command is in it, with the value that it has or as a comment."""
    first = show()
    assert (first.returncode, first.stderr) == (0, "")
    content = tomllib.loads(first.stdout)
    assert content["serve"]["port"] == ServerConfig().port
    assert content["serve"]["max_num_seqs"] == SchedulerConfig().max_num_seqs
    for path, names in known_settings(tree()).items():
        section = first.stdout.split(f"[{'.'.join(path)}]\n")[1].split("\n\n")[0]
        told = [line.removeprefix("# ").split(" =")[0] for line in section.splitlines()]
        assert told == names
    (tmp_path / "tk.toml").write_text(first.stdout)
    assert show().stdout.splitlines()[1:] == first.stdout.splitlines()[1:]


def test_it_says_who_gives_a_setting(show, tmp_path):
    (tmp_path / "tk.toml").write_text('seed = 3\n[serve]\nhost = "0.0.0.0"')
    done = show(
        "--command",
        "serve",
        "--json",
        "gpt2",
        "--max-num-seqs",
        "9",
        "--no-enable-prefix-caching",
        TK_DTYPE="float16",
    )
    assert done.returncode == 0, done.stderr
    serve = json.loads(done.stdout)["serve"]
    given = {
        name: (one["value"], one["origin"])
        for name, one in serve.items()
        if one["origin"] != "default"
    }
    file = str(tmp_path / "tk.toml")
    assert given == {
        "model": ("gpt2", "--model"), "max_num_seqs": (9, "--max-num-seqs"), "seed": (3, file),
        "enable_prefix_caching": (False, "--enable-prefix-caching"), "dtype": ("float16", "TK_DTYPE"),
        "host": ("0.0.0.0", f"{file} [serve]"),
    }  # fmt: skip


def test_with_origins_it_is_still_a_file(show, tmp_path):
    (tmp_path / "other.toml").write_text("seed = 4")
    done = show("--command", "bench offline", "--origin", "--config", "other.toml")
    assert done.stdout.startswith("# other.toml\n")
    assert tomllib.loads(done.stdout)["bench"]["offline"]["seed"] == 4
    [seed] = [line for line in done.stdout.splitlines() if line.startswith("seed = 4")]
    assert seed.endswith("# other.toml")


def test_a_command_has_its_short_help_flag_here_too(show):
    done = show("--command", "serve", "--", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: tk serve ")


def test_keys_and_passwords_are_masked(show):
    done = show(
        "--origin",
        TK_API_KEY="mine,yours",
        TK_ADMIN_KEY="boss",
        TK_URL="http://me:secret@127.0.0.1:1",
    )
    assert done.returncode == 0, done.stderr
    assert not [word for word in ("mine", "yours", "boss", "secret") if word in done.stdout]
    assert 'api_key = ["***", "***"]' in done.stdout
    assert "http://***@127.0.0.1:1" in done.stdout
    flags = show(
        "--command", "serve", "--api-key", "mine", "--api-key", "yours", "--admin-key", "boss"
    )
    assert not [word for word in ("mine", "yours", "boss") if word in flags.stdout]
    assert 'api_key = ["***", "***"]' in flags.stdout


def test_its_json_is_what_other_programs_read(show):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(show("--json").stdout, parse_constant=refuse)
    assert content["bench"]["request_rate"] == {"value": "inf", "origin": "default"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--command", "srve"), "Did you mean serve"),
        (("--command", "man"), "'man' has no settings"),
        (
            ("--command", "serve", "--prot", "1"),
            "--prot is no flag of 'tk serve'. Did you mean --port",
        ),
        (("--port", "1"), "--port is no flag of 'tk config show'"),
        (("--config", "nowhere"), "--config names nowhere, and there is no such file"),
    ],
)
def test_mistakes_are_one_line(show, arguments, says):
    done = show(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_fault(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m toolkit config show | head -n 1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "# no tk.toml"
