"""The command as a program."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys

import pytest

from toolkit.bench.client import Counts
from toolkit.bench.progress import progress_line
from toolkit.bench.run import Outcome
from toolkit.bench.stats import evaluate
from toolkit.config.clients import BenchConfig, server_url

PROGRAM = "from toolkit.cli import main; main()"


async def tk(*flags):
    """(exit code, stdout, stderr)"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "bench", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_json_goes_to_stdout_and_to_the_file(server, tmp_path):
    server.delay = 0.05
    code, out, err = await tk(
        *("--base-url", server.url, "--rps", "20", "--num-prompts", "5", "--random-output-len", "3"),
        *("--json", "--save-result", str(tmp_path / "result.json")),
    )
    document = json.loads(out)
    assert json.loads((tmp_path / "result.json").read_text()) == document
    assert document["load"]["request_rate"] == 20.0
    assert document["requests"]["succeeded"] == 5
    assert code == (1 if document["client"]["saturated"] else 0)
    assert "Loading" in err


async def test_the_table_is_plain_text_in_a_pipe(server):
    _, out, _ = await tk("--url", server.url, "--num-prompts", "3")
    assert "TTFT" in out
    assert "\x1b" not in out


async def test_a_mistake_is_one_line_on_stderr(server, tmp_path):
    code, out, err = await tk("--url", server.url, "--save-result", str(tmp_path / "missing" / "result.json"))
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert server.bodies == []


def test_a_saturated_client_is_an_exit_code_of_one():
    result = evaluate([], paced=True)
    fine = dataclasses.replace(result, num_succeeded=1)
    assert Outcome("m", fine, interrupted=False).exit_code == 0
    assert Outcome("m", dataclasses.replace(fine, saturated="it was"), interrupted=False).exit_code == 1


def test_the_command_modules_are_light():
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
    program = "import sys, toolkit.cli.bench, toolkit.cli.top, toolkit.cli.chat; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert heavy & set(loaded.split()) == set()


def test_the_progress_line_counts():
    line = progress_line(Counts(sent=10, done=6, failed=1), BenchConfig(num_prompts=20), 1.5, 1234.5)
    assert "sent 10/20, running 3, done 6" in line
    assert "1 failed" in line


@pytest.mark.parametrize(
    "text", ["127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"]
)
def test_an_address_may_be_written_in_several_ways(text):
    assert server_url(text) == "http://127.0.0.1:9"
