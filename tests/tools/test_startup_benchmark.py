"""The start-up benchmark of a server."""

from __future__ import annotations

import json
import subprocess
import sys


def run(*arguments):
    command = [sys.executable, "-m", "tools.bench.startup", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_each_start_is_a_row_with_the_phases_of_the_log(checkpoint):
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


def test_output_of_a_failed_server_is_printed(tmp_path):
    done = run(str(tmp_path), "--starts", "2")
    assert done.returncode == 1
    assert done.stdout == ""
    server_error, summary = done.stderr.strip().splitlines()
    assert str(tmp_path) in server_error
    assert summary == "tk serve ended with exit code 2."
