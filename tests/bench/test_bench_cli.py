"""`tk bench` as a program."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from toolkit.bench.load.answer_stream import LiveCounts
from toolkit.bench.progress import ProgressDisplay, sparkline
from toolkit.cli.help import repeat_flags
from toolkit.config import options
from toolkit.config.clients import server_url
from toolkit.config.load import BenchConfig


def test_json_on_stdout_equals_the_saved_files(server_in_thread, tk, tmp_path):
    server_in_thread.delay = 0.05
    code, out, err = tk(
        *(
            "serve",
            "--base-url",
            server_in_thread.url,
            "--rps",
            "20",
            "--num-prompts",
            "5",
            "--random-output-len",
            "3",
        ),
        *("--goodput", "ttft:200", "tpot:50", "--metadata", "a=1", "b=2", "--json"),
        *("--result-dir", str(tmp_path / "new"), "--result-filename", "mine"),
    )
    document = json.loads(out)
    folder = tmp_path / "new"
    assert json.loads((folder / "mine.json").read_text()) == document
    assert len((folder / "mine.jsonl").read_text().splitlines()) == 5
    assert "<svg" in (folder / "mine.html").read_text()
    assert document["settings"]["request_rate"] == 20.0
    assert document["goodput"]["objectives_s"] == {"ttft": 0.2, "tpot": 0.05}
    assert document["metadata"] == {"a": "1", "b": "2"}
    assert document["requests"]["succeeded"] == 5
    assert code == (1 if document["client"]["saturated"] else 0)
    assert "Loading" in err


def test_result_is_printed_even_if_it_cannot_be_saved(server_in_thread, tk, tmp_path):
    (tmp_path / "mine.html").mkdir()
    code, out, err = tk(
        *(
            "--url",
            server_in_thread.url,
            "--num-prompts",
            "3",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "mine",
        )
    )
    assert code == 2
    assert "requests     3 succeeded" in out
    assert f"cannot be saved in {tmp_path}: Is a directory" in " ".join(err.split())


def test_table_is_plain_text_in_a_pipe(server_in_thread, tk):
    _, out, err = tk("--url", server_in_thread.url, "--num-prompts", "3")
    assert "requests     3 succeeded" in out
    assert "\x1b" not in out + err


def test_usage_error_is_one_line_on_stderr(server_in_thread, tk, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = tk(
        "--url", server_in_thread.url, "--result-dir", str(tmp_path / "file" / "below")
    )
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert server_in_thread.bodies == []


def test_command_modules_import_nothing_heavy():
    heavy = {
        "torch",
        "transformers",
        "aiohttp",
        "textual",
        "httpx",
        "numpy",
        "prompt_toolkit",
        "orjson",
        "uvloop",
    }
    program = "import sys; from toolkit.cli.commands import bench, chat, top; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert heavy & set(loaded.split()) == set()


@pytest.mark.parametrize(
    ("line", "spread_out"),
    [
        ("--goodput ttft:1 tpot:2 --rps 3", "--goodput ttft:1 --goodput tpot:2 --rps 3"),
        ("--header A=1 B=2 C=3", "--header A=1 --header B=2 --header C=3"),
        ("--goodput ttft:1 --goodput tpot:2 A", "--goodput ttft:1 --goodput tpot:2 A"),
        ("--model a:b --goodput ttft:1 word x:1", "--model a:b --goodput ttft:1 word x:1"),
        ("x:1 --api-key k=1 l=2", "x:1 --api-key k=1 l=2"),
        ("M --names a b c --rps 3", "M --names a --names b --names c --rps 3"),
        ("M --names a --names b c", "M --names a --names b --names c"),
        ("--rps 3 M --names a b", "--rps 3 M --names a --names b"),
        ("--names a b --model M", "--names a --names b --model M"),
        ("--names a b --model=M", "--names a --names b --model=M"),
        ("--names a M", "--names a M"),
        ("--rps 3 --names a M --json", "--rps 3 --names a M --json"),
    ],
)
def test_flags_of_several_words_are_repeated(line, spread_out):
    rows = {row.name: row for row in options(BenchConfig)}
    rows["names"] = replace(rows["header"], name="names", metavar="NAME...")
    rows["model"] = replace(rows["model"], argument=True)
    assert repeat_flags(line.split(), rows) == spread_out.split()


def test_progress_shows_counts_rates_and_failures():
    progress = ProgressDisplay(BenchConfig(num_prompts=20, request_rate=5.0, duration=9.0))
    progress.add_sample(1.0, LiveCounts(sent=5, done=3, tokens=100, first_tokens=4, ttft=0.4))
    progress.add_sample(
        2.0,
        LiveCounts(
            sent=10, done=6, failed=1, tokens=350, first_tokens=9, ttft=0.9, error="HTTP 503"
        ),
    )
    text = io.StringIO()
    Console(file=text, width=80).print(progress.lines())
    shown = text.getvalue()
    assert "2.0/9 s  sent 10/20, running 3, done 6, 1 failed (HTTP 503)" in shown
    assert "5.0 sent/s, 3.0 done/s, 250 tok/s, TTFT 100.0 ms" in shown


def test_sparkline_is_scaled_to_its_highest_value():
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == "▁▂▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"],
)
def test_server_url_accepts_several_spellings(text):
    assert server_url(text) == "http://127.0.0.1:9"
