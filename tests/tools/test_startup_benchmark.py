"""Starts of a server, timed from the command to the first answer."""

from __future__ import annotations

import json
import subprocess
import sys


def run(*arguments):
    command = [sys.executable, "-m", "tools.bench.startup", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_each_start_is_a_row_with_the_phases_that_the_server_tells(checkpoint):
    done = run(
        str(checkpoint("gpt2")), "--starts", "2", "--num-threads", "1", "--kv-cache-memory", "0.01"
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert list(row["phases"]) == ["config", "weights", "KV cache"]
        assert sum(row["phases"].values()) < row["ready_s"] < 300
        assert row["first_answer_ms"] > 0


def test_of_a_server_that_does_not_start_its_own_words_are_told(tmp_path):
    done = run(str(tmp_path), "--starts", "2")
    assert done.returncode == 1
    assert done.stdout == ""
    told, ended = done.stderr.strip().splitlines()
    assert str(tmp_path) in told
    assert ended == "tk serve ended with exit code 2."
