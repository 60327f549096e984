"""`tk run`, and usage errors, as users see them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from tests import checkpoints
from tests.records import recorded
from toolkit.cli.commands.run import find_cycle
from toolkit.config.clients import ChatConfig


def test_run_prints_only_the_answer_to_stdout(checkpoint):
    """The greedy continuation of a raw prompt equals Transformers'.

    In a process of its own, where libraries may print when they are imported."""
    folder = checkpoint("gpt2")
    command = f"{sys.executable} -m toolkit run {folder} 'Hello, sea' --raw --max-tokens 12 <&-"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("Hello, sea").ids
    tokens = checkpoints.greedy(checkpoints.make_reference("gpt2"), prompt, 12)
    if checkpoints.EOS in tokens:
        tokens = tokens[: tokens.index(checkpoints.EOS)]
    assert done.stdout == tokenizer.decode([t for t in tokens if t < checkpoints.EOS]) + "\n"
    assert "Traceback" not in done.stderr


def test_run_works_where_the_locale_has_only_ascii(checkpoint, tk_here):
    """UTF-8 in arguments and standard input is read, and other characters are printed as `?`."""
    arguments = ["run", str(checkpoint("gpt2")), "é", "--raw", "--max-tokens", "40"]
    expected = tk_here(*arguments, stdin="ü\n").stdout
    assert not expected.isascii()
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments],
        input="ü\n".encode(), capture_output=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == re.sub(r"[^\x00-\x7f]", "?", expected)


@pytest.mark.parametrize("limit", [None, 60])
def test_run_stops_an_answer_that_repeats_itself(checkpoint, tk_here, monkeypatch, limit):
    """The greedy answer of a random model is a cycle soon. --max-tokens is the user's own limit."""
    monkeypatch.setattr("toolkit.cli.commands.run.CYCLE_TOKENS", 30)
    more = [] if limit is None else ["--max-tokens", str(limit)]
    done = tk_here("run", str(checkpoint("qwen2")), "a", "--raw", *more)
    assert done.returncode == 0, done.stderr
    assert ("again and again" in done.stderr) == (limit is None)


def test_cycles_are_found_only_at_the_end():
    noise = list(range(1000, 1200))
    for period in (1, 7, 66):
        cycle = (list(range(period)) * 200)[:200]
        assert find_cycle(noise + cycle) == period
        assert find_cycle([*noise, *cycle, 5000]) == 0
        assert find_cycle(cycle[:-1]) == 0
    assert find_cycle((list(range(67)) * 3)[:200]) == 0  # less than three times


def test_run_adds_piped_text_to_the_prompt(checkpoint, tk_here):
    folder = str(checkpoint("gpt2"))
    alone = tk_here("run", folder, "--raw", "--max-tokens", "12", stdin="one\n\ntwo\n")
    both = tk_here("run", folder, "one", "--raw", "--max-tokens", "12", stdin="two\n")
    assert alone.returncode == both.returncode == 0
    assert alone.stdout == both.stdout != "\n"


def test_unknown_variables_are_warned_of_with_a_suggestion(tk_here, monkeypatch, caplog):
    monkeypatch.setenv("TK_MAX_TOKEN", "5")
    monkeypatch.setenv("TK_MAX_TOKENS", "5")
    assert tk_here("run", "who are you?").returncode == 0
    found = [one.getMessage() for one in caplog.records if "no setting reads" in one.getMessage()]
    assert len(found) == 1
    assert "TK_MAX_TOKEN. Did you mean TK_MAX_TOKENS" in found[0]


def test_run_without_a_model_uses_the_demo_model(tk_here):
    done = tk_here("run", "who are you?")
    assert done.returncode == 0, done.stderr
    assert "demo model" in done.stdout


def test_run_without_a_prompt_is_an_error_of_one_line(checkpoint, tk_here):
    done = tk_here("run", str(checkpoint("gpt2")))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tk: There is no prompt")
    assert " is taken as the model; see --prompt." in done.stderr
    assert done.stderr.count("\n") == 1


def test_run_without_a_prompt_opens_a_chat_at_a_terminal(tk_here, monkeypatch):
    """Settings of the engine become flags of the chat's own server."""
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("toolkit.cli.commands.run.sys", terminal)
    chats = []
    monkeypatch.setattr(
        "toolkit.chat.run.run", lambda config, prepare, flags: chats.append((config, flags)) or 7
    )
    assert tk_here("run", "m", TK_KEEP_ALIVE="9m", TK_URL="a:1").returncode == 7
    given = ("--dtype", "bfloat16", "--no-enable-prefix-caching", "-t", "0.5", "-s", "Be brief.")
    assert tk_here("run", "m", *given, "--hf-overrides", '{"a": 1}').returncode == 7
    assert chats[0] == (ChatConfig(model="m", keep_alive="9m"), [])
    config, flags = chats[1]
    assert config == ChatConfig(model="m", temperature=0.5, system="Be brief.")
    assert flags == [
        "--dtype", "bfloat16", "--hf-overrides", '{"a": 1}', "--no-enable-prefix-caching"
    ]  # fmt: skip
    for flag in ("--raw", "--image=x.png"):
        done = tk_here("run", "m", flag)
        assert done.returncode == 2
        assert "needs a prompt" in done.stderr
    assert len(chats) == 2


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by the locale
def test_piped_bytes_that_are_not_text_are_refused(tk_here, monkeypatch, command, errors):
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors)
    monkeypatch.setattr("toolkit.console.sys", SimpleNamespace(stdin=piped))
    done = tk_here(command, "--model", "none", "who?")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tk: Standard input is not UTF-8 text.\n"


def test_unknown_model_error_suggests_the_nearest_name(tk_here, tmp_path: Path):
    (tmp_path / "tiny-model").mkdir()
    (tmp_path / "tiny-model" / "config.json").write_text("{}")
    done = tk_here("run", "tinny-model", "hi", cwd=tmp_path)
    assert done.returncode == 2
    assert "tiny-model" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert "tk chat" not in done.stderr
    with recorded("http://127.0.0.1:1", "tinny-model"):
        done = tk_here("run", "tinny-model", "hi", cwd=tmp_path)
    assert done.stderr.endswith("this asks it: tk chat tinny-model PROMPT\n")
