"""tk models, pull, show and rm as a user runs them, with a local hub."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download

from tests.hub import Hub, commit_of
from tests.server import until
from toolkit.demo import MODEL_DIR
from toolkit.hub import progress
from toolkit.inventory import removal

CARD = b"---\nlicense: apache-2.0\nlanguage: en\n---\n# A model"


def run_process(
    *arguments: str, cwd: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TK_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "toolkit", *arguments], env=kept | environment, cwd=cwd,
        input="", capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/tiny", Path(MODEL_DIR), **{"README.md": CARD})
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def pulled(
    hub: Hub, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return (HF_HOME with org/tiny, the finished tk pull)."""
    home = tmp_path_factory.mktemp("hf")
    done = run_process(
        "pull", "org/tiny", cwd=home, environment={"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    )
    assert done.returncode == 0, done.stderr
    return home, done


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    hub.requests.clear()
    hub.ranges.clear()
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}


@pytest.fixture
def tk(
    tk_with_hub: Callable, environment: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run tk with an empty cache."""
    (tmp_path / "here").mkdir()

    def call(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        variables = environment | more
        return tk_with_hub(*arguments, cwd=tmp_path / "here", variables=variables, stdin=stdin)

    return call


@pytest.fixture
def folder(pulled: tuple[Path, object], tmp_path: Path) -> Path:
    """Fill the cache with org/tiny and return its folder."""
    shutil.copytree(pulled[0] / "hub", tmp_path / "hf" / "hub", symlinks=True)
    return (
        tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / commit_of("org/tiny", "main")
    )


class TestPull:
    def test_pull_downloads_all_files_and_prints_only_the_folder(self, pulled):
        home, done = pulled
        folder = Path(done.stdout.rstrip("\n"))
        assert folder == home / "hub/models--org--tiny/snapshots" / commit_of("org/tiny", "main")
        for path in Path(MODEL_DIR).iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()
        assert (folder / "README.md").read_bytes() == CARD
        size = sum(path.stat().st_size for path in Path(MODEL_DIR).iterdir())
        # No progress bar in a pipe.
        assert done.stderr == f"org/tiny: downloading {size / 2**20:.1f} MiB.\n"

    def test_missing_model_is_downloaded_before_it_runs(self, hub, tk):
        arguments = ("run", "org/tiny", "x", "--raw", "--max-tokens", "1")
        assert "org/tiny: downloading 7.4 MiB." in tk(*arguments).stderr
        assert "downloading" not in tk(*arguments, HF_HUB_OFFLINE="1").stderr

    def test_failed_download_before_a_run_is_not_repeated(self, hub, tk):
        hub.failing = {"model.safetensors"}
        done = tk("run", "org/tiny", "x", "--raw")
        hub.failing = set()
        assert done.returncode == 2
        assert "and the hub did not answer" in done.stderr
        assert done.stderr.count("downloading") == 1

    def test_pulled_model_runs_offline(self, tk, folder):
        ran = tk("run", "org/tiny", "who are you?", HF_HUB_OFFLINE="1")
        assert ran.returncode == 0, ran.stderr
        assert "demo model" in ran.stdout

    def test_second_pull_downloads_nothing(self, hub, tk, folder):
        again = tk("pull", "org/tiny")
        assert (again.stdout, again.stderr) == (f"{folder}\n", "")
        assert not [
            request for request in hub.requests if request[0] == "GET" and "/resolve/" in request[1]
        ]

    def test_lines_show_the_progress_where_there_is_no_terminal(self, tk, monkeypatch):
        monkeypatch.setattr(progress, "INTERVAL", 0.0)
        lines = tk("pull", "org/tiny").stderr.splitlines()
        assert lines[0] == "org/tiny: downloading 7.4 MiB."
        assert re.fullmatch(r"org/tiny: 100% of 7\.4 MiB, \S+ \S+iB/s\.", lines[-1])

    def test_broken_connection_is_resumed(self, hub, tk, tmp_path, monkeypatch):
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
        no_sleep = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        monkeypatch.setattr(file_download, "time", no_sleep)
        large = os.urandom(24 * 2**14)
        (tmp_path / "large").mkdir()
        (tmp_path / "large" / "config.json").write_bytes(
            (Path(MODEL_DIR) / "config.json").read_bytes()
        )
        (tmp_path / "large" / "model.safetensors").write_bytes(large)
        hub.add("org/large", tmp_path / "large")
        hub.cut = 14 * 2**14
        done = tk("pull", "org/large")
        assert done.returncode == 0, done.stderr
        assert (Path(done.stdout.rstrip("\n")) / "model.safetensors").read_bytes() == large
        [asked] = [part for path, part in hub.ranges if path.endswith("model.safetensors")]
        assert int(asked.removeprefix("bytes=").split("-")[0]) >= 10 * 2**14

    def test_complete_files_of_a_failed_pull_are_kept(self, hub, tk, tmp_path):
        hub.failing = {"model.safetensors"}
        broken = tk("pull", "org/tiny")
        assert (broken.returncode, broken.stdout) == (2, "")
        assert "Complete files are kept" in broken.stderr
        assert "Traceback" not in broken.stderr
        assert hub.asked_for("tokenizer.json")
        # Files are downloaded in parallel: those unfinished when one fails are not kept.
        snapshot = tmp_path / "hf/hub/models--org--tiny/snapshots" / commit_of("org/tiny", "main")
        complete = {path.name for path in snapshot.iterdir()}
        hub.failing = set()
        hub.requests.clear()
        assert tk("pull", "org/tiny").returncode == 0
        fetched = [path for kind, path, _ in hub.requests if kind == "GET" and "/resolve/" in path]
        everything = {path.name for path in Path(MODEL_DIR).iterdir()} | {"README.md"}
        assert {Path(path).name for path in fetched} == everything - complete
        assert "model.safetensors" not in complete

    @pytest.mark.parametrize(
        "command", [["pull", "org/tiny"], ["serve", "org/tiny", "--port", "0", "--log-format=text"]]
    )
    def test_ctrl_c_stops_at_once_and_leaves_no_partial_files(
        self, hub, environment, tmp_path, command
    ):
        """The hub holds the weights back until the process has ended."""
        hub.held = threading.Event()
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit", *command],
            env=os.environ | environment | {"HF_HUB_OFFLINE": "0"},
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        blobs = tmp_path / "hf/hub/models--org--tiny/blobs"
        try:
            until(
                lambda: [
                    path
                    for kind, path, _ in hub.requests
                    if kind == "GET" and "model.safetensors" in path
                ]
            )
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=90)
        finally:
            hub.held.set()
            hub.held = None
        assert (process.returncode, stdout) == (130, "")
        assert "org/tiny: downloading 7.4 MiB." in stderr
        assert stderr.endswith("Stopped. Complete files are kept.\n")
        assert "Fetching" not in stderr
        assert "Traceback" not in stderr
        assert not list(blobs.glob("*.incomplete"))

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("org/tny", "There is no model org/tny"),
            ("./folder", "takes the name of a model on the hub"),
            ("/etc", "takes the name of a model on the hub"),
            ("hf.co/org/tiny:Q4_K_M", "name of that model on the hub is org/tiny:Q4_K_M.\n"),
            ("tk-demo", "tk-demo comes with tk: there is nothing to download."),
        ],
    )
    def test_invalid_name_is_an_error_of_one_line(self, tk, name, says):
        done = tk("pull", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
        assert done.stderr.count("\n") == 1

    def test_gated_model_and_unknown_revision(self, hub, tk):
        hub.add("org/locked", Path(MODEL_DIR))
        hub.gated.add("org/locked")
        assert "accept its terms" in tk("pull", "org/locked").stderr
        assert "no revision 'v9'" in tk("pull", "org/tiny", "--revision", "v9").stderr

    def test_name_without_an_owner_gets_names_that_the_hub_has(self, tk):
        for down in ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
            done = tk("pull", "llama3.2", **down)
            assert done.returncode == 2
            assert "Names on the hub are OWNER/NAME." in done.stderr
            assert re.search(
                r"^  Qwen/Qwen3-0\.6B +1\.11 GiB  (yes|no)$", done.stderr, re.MULTILINE
            )
            unknown = tk("show", "llama3.2", **down).stderr
            assert unknown.endswith("Names on the hub are OWNER/NAME.\n")
            assert done.stderr.count("OWNER/NAME") == 1
        assert "OWNER/NAME" not in tk("pull", "org/never").stderr

    def test_offline_error_names_the_hub_and_an_earlier_download(self, tk, folder):
        down = {"HF_ENDPOINT": "http://127.0.0.1:9"}
        never = tk("pull", "org/never", **down)
        assert (never.returncode, never.stdout) == (2, "")
        assert "the hub did not answer" in never.stderr
        assert "http://127.0.0.1:9 (HF_ENDPOINT)" in never.stderr
        unseen = tk("show", "org/never", **down).stderr
        assert "no folder of that name in" in unseen
        assert "and the hub did not answer" in unseen
        assert f"is in {folder}" in tk("pull", "org/tiny", **down).stderr
        assert "HF_HUB_OFFLINE is set" in tk("pull", "org/tiny", HF_HUB_OFFLINE="1").stderr

    def test_full_disk_is_reported_before_the_download(self, hub, tk, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        done = tk("pull", "org/tiny")
        assert done.returncode == 2
        assert "org/tiny needs 7.4 MiB more, and 1000 B are free" in done.stderr.replace("\n", " ")
        assert not hub.asked_for("model.safetensors")


class TestShow:
    def test_model_on_the_hub_is_described_without_downloading_it(self, hub, tk):
        done = tk("show", "org/tiny", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        shown = json.loads(done.stdout)
        config = json.loads((Path(MODEL_DIR) / "config.json").read_text())
        assert shown["config"] == config
        assert shown["architecture"] == config["architectures"][0]
        assert (shown["context"], shown["license"], shown["path"]) == (512, "apache-2.0", None)
        assert (
            shown["files"]["model.safetensors"]
            == (Path(MODEL_DIR) / "model.safetensors").stat().st_size
        )
        parts = [part for path, part in hub.ranges if path.endswith("model.safetensors")]
        assert parts
        assert not [
            path
            for kind, path, _ in hub.requests
            if kind == "GET" and path.endswith("tokenizer.json")
        ]

    def test_pulled_model_is_described_the_same_offline(self, tk, folder, tmp_path):
        on_hub = json.loads(
            tk("show", "org/tiny", "--json", HF_HOME=str(tmp_path / "other")).stdout
        )
        here = json.loads(tk("show", "org/tiny", "--json", HF_HUB_OFFLINE="1").stdout)
        assert here["path"] == str(folder)
        for name in (
            "parameters",
            "dtype",
            "context",
            "tokenizer",
            "chat_template",
            "license",
            "config",
        ):
            assert here[name] == on_hub[name], name

    @pytest.mark.parametrize("name", [(), ("tk-demo",)])
    def test_text_output_has_the_main_facts(self, tk, name):
        done = tk("show", *name)
        assert (done.returncode, done.stderr) == (0, "")
        facts = dict(
            line.strip().split(maxsplit=1)
            for line in done.stdout.splitlines()[1:]
            if "  " in line.strip()
        )
        assert facts["parameters"] == "3.81M, stored in float16"
        assert facts["context"] == "512 tokens"
        assert facts["location"] == str(MODEL_DIR)

    def test_unsupported_model_is_described_too(self, tk, tmp_path):
        folder = tmp_path / "here" / "strange"
        folder.mkdir()
        (folder / "config.json").write_text(
            '{"architectures": ["StrangeModel"], "max_position_embeddings": 77}'
        )
        done = tk("show", "./strange")
        assert done.returncode == 0, done.stderr
        assert "StrangeModel - tk does not support StrangeModel" in done.stdout
        assert "77 tokens" in done.stdout

    def test_control_characters_in_model_files_are_escaped(self, tk, tmp_path):
        folder = tmp_path / "here" / "evil"
        folder.mkdir()
        evil = "\x1b]0;owned\x07\x9b31m\u202e[bold]"
        (folder / "config.json").write_text(
            json.dumps({"architectures": [evil], "model_type": evil, "dtype": evil})
        )
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": evil, "chat_template": evil})
        )
        (folder / "README.md").write_text(f"---\nlicense: {evil}\n---\n")
        for line in (
            "show ./evil",
            "show ./evil --json",
            "models",
            "models --json",
            "serve ./evil --dry-run",
        ):
            done = tk(*line.split())
            assert not [
                sign for sign in "\x1b\x07\x9b\u202e" if sign in done.stdout + done.stderr
            ], line

    def test_unknown_name_is_an_error(self, tk):
        done = tk("show", "org/nothing")
        assert (done.returncode, done.stdout) == (2, "")
        assert "There is no model org/nothing" in done.stderr
        assert tk("show", "").stderr == "tk: The name of the model is empty.\n"


def test_dry_run_of_a_hub_model_equals_that_of_a_local_one(hub, tk):
    settings = ("--max-num-seqs", "2", "--device", "cpu", "--json")
    on_hub = tk("serve", "org/tiny", "--dry-run", *settings)
    assert on_hub.returncode == 0, on_hub.stderr
    assert not [
        path for kind, path, _ in hub.requests if kind == "GET" and path.endswith("tokenizer.json")
    ]
    here = tk("serve", str(MODEL_DIR), "--dry-run", *settings)
    drop = {"model", "memory_free_bytes"}
    estimates = [
        {key: value for key, value in json.loads(one.stdout).items() if key not in drop}
        for one in (on_hub, here)
    ]
    assert estimates[0] == estimates[1]


def test_dry_run_of_a_hub_model_refuses_settings(hub, tk):
    drafter = json.dumps({"method": "draft_model", "model": "org/tiny"})
    for flags, problem in (
        (("--tensor-parallel-size", "3"), "the model's 8 attention heads cannot be divided"),
        (("--attention-backend", "flash"), "The attention backend flash cannot run here"),
    ):
        done = tk("serve", "org/tiny", "--dry-run", "--device", "cpu", *flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert problem in done.stderr
    done = tk("serve", "org/tiny", "--dry-run", "--device", "cpu", "--speculative-config", drafter)
    assert (done.returncode, "drafter" in done.stdout) == (0, True), done.stderr
    assert (
        not [
            path for kind, path, _ in hub.requests if kind == "GET" and path.endswith("safetensors")
        ]
        or hub.ranges
    )


class TestModels:
    def test_list_has_the_demo_model_folders_and_downloads(self, tk, tmp_path, folder):
        (tmp_path / "here" / "mine").symlink_to(MODEL_DIR)
        (tmp_path / "here" / "broken").mkdir()
        (tmp_path / "here" / "broken" / "config.json").write_text("{")
        listed = json.loads(tk("models", "--json", "--", ".", "mine", "../here").stdout)
        rows = {row["name"]: row for row in listed}
        assert rows.keys() == {"tk-demo", "mine", "broken", "org/tiny"}
        assert len(listed) == len(rows), "a model is listed once"
        for name in ("tk-demo", "mine", "org/tiny"):
            assert rows[name]["fits"] == "yes"
            assert (rows[name]["parameters"], rows[name]["context"]) == (3_814_912, 512)
        assert rows["broken"]["fits"] == "not run"
        assert "cannot be read" in rows["broken"]["problem"]

    def test_adapters_are_listed_with_their_base_and_not_served_alone(self, tk, tmp_path):
        adapter = tmp_path / "here" / "sql"
        adapter.mkdir()
        config = {"peft_type": "LORA", "base_model_name_or_path": "org/tiny"}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        rows = {row["name"]: row for row in json.loads(tk("models", "--json").stdout)}
        assert rows["sql"]["adapter_of"] == "org/tiny"
        assert rows["tk-demo"]["adapter_of"] is None
        assert re.search(r"^sql +adapter .* of org/tiny$", tk("models").stdout, re.MULTILINE)
        for content, problem in (("{", "cannot be read"), ("{}", "does not name the base model")):
            (adapter / "adapter_config.json").write_text(content)
            assert f"sql: adapter_config.json {problem}." in tk("models").stderr
        served = tk("serve", "./sql")
        assert served.returncode == 2
        assert "--lora-modules sql=" in served.stderr

    def test_model_that_was_only_described_is_not_listed(self, hub, tk):
        assert tk("show", "org/tiny").returncode == 0
        assert hub.asked_for("config.json")
        assert [row["name"] for row in json.loads(tk("models", "--json").stdout)] == ["tk-demo"]

    def test_table_is_on_stdout_and_notes_are_on_stderr(self, tk):
        done = tk("ls")  # or list, or models
        head, row = done.stdout.splitlines()
        assert head.split() == ["MODEL", "KIND", "PARAMS", "DTYPE", "SIZE", "CONTEXT", "FITS"]
        assert row.split() == ["tk-demo", "gpt2", "3.81M", "float16", "7.4", "MiB", "512", "yes"]
        assert "\x1b" not in done.stdout + done.stderr
        assert done.stderr.startswith("1 model, 7.4 MiB.")

    def test_missing_folder_is_an_error(self, tk):
        done = tk("models", "nowhere")
        assert (done.returncode, done.stderr) == (2, "tk: There is no folder nowhere.\n")


class TestRemove:
    def test_yes_removes_the_model_but_no_copy_with_the_same_commits(self, tk, tmp_path, folder):
        shutil.copytree(
            tmp_path / "hf/hub/models--org--tiny",
            tmp_path / "hf/hub/models--org--other",
            symlinks=True,
        )
        before = {path for path in tmp_path.rglob("*") if "models--org--tiny" not in str(path)}
        done = tk("rm", "org/tiny", "--yes")
        assert done.returncode == 0, done.stderr
        assert not folder.exists()
        assert set(tmp_path.rglob("*")) >= before

    def test_demo_model_is_not_removed(self, tk):
        done = tk("rm", "tk-demo", "--yes")
        assert (done.returncode, done.stderr) == (
            2,
            "tk: tk-demo comes with tk: there is nothing to remove.\n",
        )

    def test_question_answered_with_no_keeps_the_model(self, tk, monkeypatch, folder):
        for answer, code in (("n", 1), ("", 1), ("y", 0)):
            assert folder.exists()
            ours, theirs = pty.openpty()
            with open(theirs) as terminal, monkeypatch.context() as patch:
                patch.setattr(removal, "sys", SimpleNamespace(stdin=terminal, stderr=sys.stderr))
                os.write(ours, f"{answer}\n".encode())
                done = tk("rm", "org/tiny")
            os.close(ours)
            assert "Remove 7.4 MiB? [y/N]" in done.stderr
            assert done.returncode == code
        assert not folder.exists()

    def test_without_a_terminal_nothing_is_removed(self, tk, folder):
        done = tk("rm", "org/tiny", stdin="y\n")
        assert done.returncode == 2
        assert "--yes" in done.stderr
        assert folder.exists()

    @pytest.mark.parametrize("name", ["..", "/", "org/../../here", "org/nothing", "mine"])
    def test_nothing_outside_the_cache_is_removed(self, tk, tmp_path, folder, name):
        (tmp_path / "here" / "mine").mkdir()
        before = set(tmp_path.rglob("*"))
        done = tk("rm", name, "--yes")
        assert (done.returncode, done.stdout) == (2, "")
        assert set(tmp_path.rglob("*")) >= before

    def test_link_out_of_the_cache_is_not_followed(self, tk, tmp_path, folder):
        entry = tmp_path / "hf" / "hub" / "models--org--tiny"
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
        done = tk("rm", "org/tiny", "--yes")
        assert done.returncode == 2
        assert "is a link out of the cache" in done.stderr or "has no model" in done.stderr
        assert list((tmp_path / "elsewhere" / "snapshots").iterdir())
