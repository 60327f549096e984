"""`tk config show`: values, origins, and masked secrets."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cli.help import known_settings
from toolkit.cli.root import tree
from toolkit.config import SchedulerConfig, ServerConfig


@pytest.fixture
def show(tk_here: Callable, tmp_path: Path):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return tk_here("config", "show", *arguments, cwd=tmp_path, **environment)

    return run


def test_config_show_output_is_a_complete_settings_file(show, tmp_path):
    """The file has every setting of every command, with its value or as a comment."""
    first = show()
    assert (first.returncode, first.stderr) == (0, "")
    content = tomllib.loads(first.stdout)
    assert content["serve"]["port"] == ServerConfig().port
    assert content["serve"]["max_num_seqs"] == SchedulerConfig().max_num_seqs
    for path, names in known_settings(tree()).items():
        section = first.stdout.split(f"[{'.'.join(path)}]\n")[1].split("\n\n")[0]
        listed = [line.removeprefix("# ").split(" =")[0] for line in section.splitlines()]
        assert listed == names
    (tmp_path / "tk.toml").write_text(first.stdout)
    assert show().stdout.splitlines()[1:] == first.stdout.splitlines()[1:]


def test_config_show_json_has_values_and_origins(show, tmp_path):
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
        "model": ("gpt2", "--model"),
        "max_num_seqs": (9, "--max-num-seqs"),
        "seed": (3, file),
        "enable_prefix_caching": (False, "--enable-prefix-caching"),
        "dtype": ("float16", "TK_DTYPE"),
        "host": ("0.0.0.0", f"{file} [serve]"),
    }


@pytest.mark.parametrize(
    ("command", "arguments", "model", "prompt"),
    [
        ("chat", ["gpt2"], "gpt2", None),
        ("chat", ["two words"], "of TK_MODEL", "two words"),
        ("chat", ["a folder"], "a folder", None),
        ("chat", ["~/a folder"], "~/a folder", None),
        ("chat", ["gpt2", "hi"], "gpt2", "hi"),
        ("chat", ["--model", "gpt2", "hi"], "gpt2", "hi"),
        ("chat", ["--model", "gpt2", "two words"], "gpt2", "two words"),
        ("chat", ["--prompt", "hi", "gpt2"], "gpt2", "hi"),
        ("run", ["two words"], "of TK_MODEL", "two words"),
    ],
    ids=str,
)
def test_arguments_fill_settings_without_a_flag(show, tmp_path, command, arguments, model, prompt):
    (tmp_path / "a folder").mkdir()
    variables = {"TK_MODEL": "of TK_MODEL", "HOME": str(tmp_path)}
    done = show("--command", command, "--json", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)[command]
    assert (settings["model"]["value"], settings["prompt"]["value"]) == (model, prompt)


def test_config_show_takes_repeatable_arguments_as_flags_or_words(show):
    for words in (["--url", "a", "--url", "b"], ["a", "b"]):
        done = show("--command", "top", "--json", *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["top"]["url"] == {"value": ["a", "b"], "origin": "--url"}


def test_config_show_with_origins_is_a_settings_file(show, tmp_path):
    (tmp_path / "other.toml").write_text("seed = 4")
    done = show("--command", "bench offline", "--origin", "--config", "other.toml")
    assert done.stdout.startswith("# other.toml\n")
    assert tomllib.loads(done.stdout)["bench"]["offline"]["seed"] == 4
    [seed] = [line for line in done.stdout.splitlines() if line.startswith("seed = 4")]
    assert seed.endswith("# other.toml")


def test_config_show_accepts_a_commands_help_flag(show):
    done = show("--command", "serve", "--", "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: tk serve ")


def test_config_show_masks_keys_and_passwords(show):
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


def test_config_show_json_has_no_nonstandard_constants(show):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(show("--json").stdout, parse_constant=refuse)
    assert content["bench"]["request_rate"] == {"value": "inf", "origin": "default"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--command", "srve"), "Did you mean serve"),
        (("--command", "man"), "'man' has no settings"),
        (
            ("--command", "serve", "--prot", "1"),
            "Unknown flag --prot of 'tk serve'. Did you mean --port",
        ),
        (("--port", "1"), "Unknown flag --port of 'tk config show'"),
        (("--config", "nowhere"), "--config names nowhere, which does not exist"),
    ],
)
def test_config_show_usage_errors_are_one_line(show, arguments, message):
    done = show(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_config_show_with_a_closed_pipe_is_no_error(tmp_path):
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"unset PYTHONUNBUFFERED; {sys.executable} -m toolkit config show | head -n 1",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "# no tk.toml"
