"""Models from a local hub with the real hub's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.hub import Hub, commit_of, hub_variables
from toolkit import LLM, SamplingParams
from toolkit.errors import ToolkitError
from toolkit.hub import cached_names, locate, locate_adapter, locate_tokenizer


@pytest.fixture
def hub(checkpoint: Callable[[str], Path]) -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/tiny", checkpoint("gpt2"))
    yield hub
    hub.close()


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Callable[..., str]:
    """Return what a function returns or raises, with our hub and an initially empty cache."""

    def run(function: Callable[..., object], *arguments: str | None, **environment: str) -> str:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), **environment}
        with hub_variables(settings), pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in settings.items():
                patch.setenv(name, value)
            try:
                return str(function(*arguments))
            except ToolkitError as error:
                return f"{type(error).__name__}: {error.message}"

    return run


def run(name: str) -> list[int]:
    """Return eight tokens of a model."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(name, device="cpu", max_num_seqs=2)
    try:
        return llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    finally:
        llm.shutdown()


def test_model_is_downloaded_once_and_then_runs_offline(hub, ask):
    expected = str(checkpoints.greedy(checkpoints.make_reference("gpt2"), [1, 2, 3], 8))
    assert ask(run, "org/tiny") == expected
    assert hub.asked_for("model.safetensors")
    count = len(hub.requests)
    assert ask(run, "org/tiny", HF_HUB_OFFLINE="1") == expected
    assert len(hub.requests) == count


def test_downloaded_files_equal_the_served_ones(hub, ask, checkpoint):
    folder = Path(ask(locate, "org/tiny"))
    source = checkpoint("gpt2")
    assert (folder / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert {path.name for path in folder.iterdir()} == {path.name for path in source.iterdir()}
    assert not hub.asked_for("onnx")
    assert folder.name == commit_of("org/tiny", "main")


def test_second_call_downloads_nothing(hub, ask):
    first = ask(locate, "org/tiny")
    hub.requests.clear()
    assert ask(locate, "org/tiny") == first
    assert not [
        request for request in hub.requests if request[0] == "GET" and "/resolve/" in request[1]
    ]


def test_another_revision(hub, ask, checkpoint):
    hub.add("org/tiny", checkpoint("llama3-gqa"), revision="v2")
    folders = [Path(ask(locate, "org/tiny", revision)) for revision in ("v2", None)]
    kinds = [json.loads((folder / "config.json").read_text())["model_type"] for folder in folders]
    assert kinds == ["llama", "gpt2"]
    assert ask(locate, "org/tiny", "v2", HF_HUB_OFFLINE="1") == str(folders[0])


def test_unknown_revision_is_an_error(hub, ask):
    answer = ask(locate, "org/tiny", "v9")
    assert answer == "ModelNotFoundError: org/tiny has no revision 'v9' on the hub."


def test_unknown_name_gets_suggestions_from_the_cache(hub, ask):
    ask(locate, "org/tiny")
    answer = ask(locate, "org/tny")
    assert answer.startswith("ModelNotFoundError: There is no model org/tny")
    assert "none on the hub" in answer
    assert "HF_TOKEN" in answer
    assert answer.endswith("Did you mean org/tiny?")


def test_offline_error_names_the_searched_places(hub, ask, tmp_path):
    answer = ask(locate, "org/tiny", HF_HUB_OFFLINE="1")
    assert "ModelNotFoundError" in answer
    assert "HF_HUB_OFFLINE is set" in answer
    assert str(tmp_path / "hf") in answer
    assert not hub.requests


def test_gated_model_error_mentions_the_token(hub, ask, checkpoint):
    hub.add("org/locked", checkpoint("gpt2"))
    hub.gated.add("org/locked")
    answer = ask(locate, "org/locked")
    assert answer.startswith("ModelNotFoundError: org/locked is a gated model")
    assert "HF_TOKEN" in answer


def test_token_is_sent(hub, ask, checkpoint):
    hub.add("org/secret", checkpoint("gpt2"))
    hub.private["org/secret"] = "hf_of_mine"
    assert "ModelNotFoundError" in ask(locate, "org/secret")
    folder = ask(locate, "org/secret", HF_TOKEN="hf_of_mine")
    assert (Path(folder) / "model.safetensors").is_file()


def test_cache_is_used_when_the_hub_is_down(hub, ask):
    first = ask(locate, "org/tiny")
    hub.broken = True
    assert ask(locate, "org/tiny") == first
    answer = ask(locate, "org/other")
    assert answer.startswith("ModelNotFoundError: There is no model org/other")
    assert "the hub did not answer" in answer
    hub.close()  # now the connection is refused
    assert ask(locate, "org/tiny") == first


def test_only_safetensors_are_downloaded_if_there_are_both(hub, ask, checkpoint):
    hub.add(
        "org/both", checkpoint("gpt2"), **{"pytorch_model.bin": b"x" * 1000, "tf_model.h5": b"x"}
    )
    folder = Path(ask(locate, "org/both"))
    assert (folder / "model.safetensors").is_file()
    assert not hub.asked_for("pytorch_model.bin")
    assert not hub.asked_for("tf_model.h5")
    assert ask(locate, "org/both", HF_HUB_OFFLINE="1") == str(folder)


def test_bin_weights_are_downloaded_without_safetensors(hub, ask, checkpoint, tmp_path):
    folder = tmp_path / "old"
    checkpoints.save(checkpoints.make_reference("gpt2"), folder)
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    hub.add("org/old", folder)
    fetched = ask(locate, "org/old")
    assert (Path(fetched) / "pytorch_model.bin").is_file()
    assert ask(locate, "org/old", HF_HUB_OFFLINE="1") == fetched


def test_interrupted_download_is_not_a_model(hub, ask, tmp_path):
    folder = Path(ask(locate, "org/tiny"))
    (folder / "model.safetensors").unlink()
    assert "it is not in the cache" in ask(locate, "org/tiny", HF_HUB_OFFLINE="1")


def test_tokenizer_is_downloaded_without_weights(hub, ask):
    folder = Path(ask(locate_tokenizer, "org/tiny"))
    assert (folder / "tokenizer.json").is_file()
    assert not hub.asked_for("model.safetensors")
    hub.broken = True
    assert ask(locate_tokenizer, "org/tiny") == str(folder)
    assert "There is no folder ./nowhere/at/all" in ask(locate_tokenizer, "./nowhere/at/all")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"HF_HOME": "~/hf"},
        {"HF_HUB_CACHE": "/cache"},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "", "HF_HUB_CACHE": "rel"},
    ],
    ids=str,
)
def test_cache_folder_equals_the_hub_librarys(settings, monkeypatch):
    """Completions find the cache without importing the hub's library."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    asked: list[Path] = []
    monkeypatch.setattr(Path, "glob", lambda self, pattern: asked.append(self) or [])
    cached_names()
    theirs = subprocess.run(
        [
            sys.executable,
            "-c",
            "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [os.path.abspath(path) for path in asked] == [os.path.abspath(theirs.stdout.strip())]


def test_adapters_are_found_like_models(hub, ask, tmp_path):
    """From the hub, then from the cache; a folder is taken as it is."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes(b"{}")
    hub.add("org/sql", adapter)
    found = Path(ask(locate_adapter, "org/sql"))
    assert {path.name for path in found.iterdir()} >= {path.name for path in adapter.iterdir()}
    assert ask(locate_adapter, "org/sql", HF_HUB_OFFLINE="1") == str(found)
    assert ask(locate_adapter, "./adapter") == "adapter"
    assert "There is no model org/other" in ask(locate_adapter, "org/other")


def test_paths_of_models_are_absolute(tmp_path, monkeypatch):
    """A grammar's tokenizer is read later, when the process may be in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert locate("model") == locate_tokenizer("model") == tmp_path / "model"
