"""Adapters that requests can name, in one process and in several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.config import LoRAConfig
from toolkit.engine.front.adapters import MAX_LISTED, AdapterRegistry
from toolkit.errors import InvalidRequestError, ToolkitError
from toolkit.lora.files import find_adapter


def make(folder: Path, content: str = "x") -> Path:
    folder.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).write_text(content)
        os.utime(folder / file, (1, 1))
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    make(tmp_path / "outside")
    for name in ("one", "two"):
        make(tmp_path / "root" / name)
    return tmp_path / "root"


def registry(root: Path, file: Path | None = None) -> AdapterRegistry:
    return AdapterRegistry(LoRAConfig(lora_dir=str(root)), file)


def test_names_that_no_folder_has_are_unknown(root):
    (root / "link").symlink_to(root.parent / "outside")
    (root / "loop").symlink_to("loop")
    (root / "inner").symlink_to(root / "one")
    make(root / "with space")
    made = registry(root)
    for name in (
        "a" * 5000,
        "ü" * 200,
        ".",
        "..",
        "../outside",
        "link",
        "loop",
        "with space",
        "a\0b",
        "",
    ):
        assert made.find(name) is None
    assert made.find("inner") is not None
    assert made.names == ["inner", "one", "two"]


def test_unusable_paths_are_refused(root):
    made = registry(root)
    for path in ("a" * 5000, "a\0b", "~no-such-user/x", "link", "loop", "", ".", "/proc/self/root"):
        with pytest.raises(ToolkitError):
            made.find_at("new", path)


def test_paths_are_relative_to_the_directory(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "one")
    assert registry(root).find_at("new", "one").folder == str(root / "one")
    assert registry(root).find_at("new", str(root / "one")).folder == str(root / "one")
    with pytest.raises(InvalidRequestError, match="must be inside"):
        registry(root).find_at("new", str(tmp_path / "one"))


def test_without_a_directory_only_lora_modules_are_loaded(root, monkeypatch):
    monkeypatch.chdir(root)
    made = AdapterRegistry(LoRAConfig(lora_modules=("first=./one",), allow_runtime_lora=True))
    assert made.find_at("new", "./one").folder == str(root / "one")
    with pytest.raises(InvalidRequestError, match=r"can be loaded again: \./one\.$"):
        made.find_at("new", "two")


def test_messages_list_some_names(root):
    made = registry(root)
    assert made.describe_names("base") == "'base', the folders in --lora-dir"
    made.start([find_adapter(f"n{number}", root / "one") for number in range(MAX_LISTED + 2)])
    assert made.describe_names("base").endswith(", 3 more, the folders in --lora-dir")


def test_broken_and_unloaded_adapters_are_not_listed(root, tmp_path):
    made, other = (registry(root, tmp_path / "file") for _ in range(2))
    one = made.find("one")
    assert made.note_reading(one, is_broken=True)
    assert not made.note_reading(one, is_broken=True)
    assert other.names == ["two"]
    assert "'one'" not in other.describe_names()
    assert other.find("one") == one  # is tried again
    (root / "one" / "adapter_config.json").write_text("changed")
    assert made.names == ["one", "two"]
    assert made.note_reading(one, is_broken=False)
    made.remove("two")
    assert other.names == ["one"]
    assert other.find("two") is None
    assert "'two' was unloaded" in other.explain_missing("two")
    other.put(other.find_at("two", "two"))
    assert made.names == ["one", "two"]


def test_folders_that_lack_a_file_are_explained(root):
    (root / "one" / "adapter_model.safetensors").unlink()
    made = registry(root)
    assert made.names == ["two"]
    assert made.find("one") is None
    assert "no adapter_model.safetensors" in made.explain_missing("one")
    for name in ("two", "none", "../outside", "a" * 5000):
        assert made.explain_missing(name) is None


def test_folders_are_absolute(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    made = registry(Path("root"))
    assert made.folders == {name: str(root / name) for name in ("one", "two")}
    assert made.find("one").folder == str(root / "one")


def test_processes_see_each_other_s_changes(root, tmp_path, monkeypatch):
    """The clock of the file system may not advance between two changes."""
    monkeypatch.setattr(os, "replace", replace_within_a_tick)
    first, second = (registry(root, tmp_path / "file") for _ in range(2))
    first.put(find_adapter("a", root / "one"))
    assert second.names == ["a", "one", "two"]
    second.put(find_adapter("b", root / "two"))
    first.put(find_adapter("c", root / "one"))
    for made in (first, second):
        assert made.names == ["a", "b", "c", "one", "two"]


def replace_within_a_tick(source: Path, target: Path) -> None:
    if os.stat(source).st_mtime > 1:
        os.utime(source, (10**9, 10**9))
    os.rename(source, target)


def test_folders_with_equal_times_are_other_revisions(root):
    one, two = (find_adapter("name", root / name) for name in ("one", "two"))
    assert one.revision != two.revision
