"""The numbers of `tk serve --dry-run` match the server's log and /server_info."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local import LocalServer

SETTINGS = (
    "--dtype",
    "bfloat16",
    "--max-num-seqs",
    "5",
    "--max-model-len",
    "128",
    "--block-size",
    "8",
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory):
    running = LocalServer(
        str(checkpoint("llama3-gqa")), *SETTINGS, cwd=tmp_path_factory.mktemp("server")
    )
    yield running
    running.stop()


@pytest.fixture
def dry_run(
    tk_here: Callable, checkpoint: Callable[[str], Path]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *flags: tk_here("serve", str(checkpoint("llama3-gqa")), *flags, "--dry-run")


def test_dry_run_json_matches_server_info(server: LocalServer, dry_run: Callable):
    done = dry_run(*SETTINGS, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    estimate = json.loads(done.stdout)
    actual = server.http.get("/server_info").json()["models"][0]["device"]
    names = (
        "dtype", "num_parameters", "block_size", "num_blocks", "cache_bytes", "max_model_len",
    )  # fmt: skip
    assert {name: estimate[name] for name in names} == {name: actual[name] for name in names}
    weight_bytes = estimate["weight_bytes"]
    assert weight_bytes <= actual["weight_bytes"] < 1.25 * weight_bytes  # packing pads small ones
    assert (estimate["fits"], estimate["problem"]) == (True, None)
    assert estimate["num_sequences"] == actual["num_blocks"] * 8 / 128


def test_dry_run_text_matches_the_servers_startup_log(server: LocalServer, dry_run: Callable):
    done = dry_run(*SETTINGS)
    assert (done.returncode, done.stderr) == (0, "It fits.\n")
    card = " ".join(server.stderr.split())
    assert "640 tokens: 5.0 requests of the full 128" in card
    assert "640 tokens" in done.stdout
    assert "5.0 sequences of that length" in done.stdout


def test_dry_run_exits_with_1_and_the_largest_context_that_fits(dry_run: Callable):
    tight = (*SETTINGS, "--kv-cache-memory", "0.00001")  # ten blocks of 2 x 2 x 8 x 2 x 8 x 2 bytes
    done = dry_run(*tight, "--json")
    assert done.returncode == 1
    estimate = json.loads(done.stdout)
    assert not estimate["fits"]
    assert estimate["largest_max_model_len"] == 10 * 8
    fitting = dry_run(*tight, "--max-model-len", str(estimate["largest_max_model_len"]))
    assert fitting.returncode == 0, fitting.stderr


def test_json_without_dry_run_is_an_error(tk_here: Callable):
    done = tk_here("serve", "--json")
    assert (done.returncode, done.stderr) == (2, "tk: --json needs --dry-run.\n")
