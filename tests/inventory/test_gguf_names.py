"""GGUF models by name: a file, a folder, and a repository of the hub with a quantization."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import checkpoints
from tests.hub import Hub
from tests.models import gguf_models
from tests.models.architectures import ARCHITECTURES
from toolkit.errors import CheckpointError
from toolkit.gguf.names import choose, labels, models_in
from toolkit.hub import locate
from toolkit.inventory.checkpoint import read_folder
from toolkit.serving.checks import default_name

FILES = [
    "README.md",
    "Tiny.Q8_0.gguf",
    "Tiny.F32.gguf",
    "mmproj-Tiny-F16.gguf",
    "big/Tiny-Q4_K_M-00001-of-00002.gguf",
    "big/Tiny-Q4_K_M-00002-of-00002.gguf",
    "Tiny-UD-Q4_K_XL.gguf",
    "tiny-q4_k_s.gguf",
]


def test_files_are_grouped_to_models_without_projectors():
    found = models_in(FILES)
    assert set(found) == {*FILES[1:3], FILES[4], *FILES[6:]}
    assert found[FILES[4]] == FILES[4:6]
    assert sorted(labels(found).values()) == ["F32", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q4_K_XL"]


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q8_0", FILES[1]),
        ("q8_0", FILES[1]),
        ("F32", FILES[2]),
        ("q4_k_m", FILES[4]),
        ("Q4_K_S", FILES[7]),
        ("UD-Q4_K_XL", FILES[6]),
        ("Q4_K_XL", FILES[6]),
        ("tiny-q4_k_s.gguf", FILES[7]),
    ],
)
def test_quantization_chooses_a_file(wanted, file):
    assert choose(FILES, wanted, "org/tiny") == file


@pytest.mark.parametrize("wanted", ["Q4_K", "Q5_K_M", "Q4", "F16", "tiny", None])
def test_missing_or_ambiguous_quantization_lists_what_there_is(wanted):
    with pytest.raises(CheckpointError, match=r"org/tiny has (several|no) .* org/tiny:Q8_0"):
        choose(FILES, wanted, "org/tiny")


def test_labels_of_equal_quantizations_are_file_names():
    assert labels(["a-Q4_0.gguf", "b-Q4_0.gguf", "c.gguf"]) == {
        "a-Q4_0.gguf": "a-Q4_0",
        "b-Q4_0.gguf": "b-Q4_0",
        "c.gguf": "c",
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model in F32 and in Q8_0."""
    folder = tmp_path_factory.mktemp("tiny")
    model = checkpoints.make_model("Llama", ARCHITECTURES["llama2-mha"][1] | {"hidden_size": 64})
    more = {"general__license": "mit"}
    gguf_models.write_model(folder / "Tiny.F32.gguf", model, "llama", **more)
    gguf_models.write_model(folder / "Tiny.Q8_0.gguf", model, "llama", quantized=True, **more)
    (folder / "mmproj-Tiny.gguf").write_bytes(b"GGUF")
    return folder


@pytest.mark.parametrize(("file_type", "expected"), [(15, "Q4_K_M"), (7, "Q8_0"), (99, "Q8_0")])
def test_type_of_a_file_is_its_mixture(tmp_path, file_type, expected):
    """Most numbers of a small Q4_K_M are those of its Q8_0 embeddings."""
    model = checkpoints.make_model("Llama", ARCHITECTURES["llama2-mha"][1] | {"hidden_size": 64})
    more = {"general__file_type": file_type}
    file = gguf_models.write_model(tmp_path / "m.gguf", model, "llama", quantized=True, **more)
    assert read_folder(file, "m").stored_type == expected


def test_folder_with_one_model_is_that_model(tiny, tmp_path):
    (tmp_path / "Tiny.F32.gguf").symlink_to(tiny / "Tiny.F32.gguf")
    (tmp_path / "mmproj-Tiny.gguf").touch()
    assert locate(str(tmp_path)) == tmp_path / "Tiny.F32.gguf"
    assert locate(str(tmp_path / "Tiny.F32.gguf")) == tmp_path / "Tiny.F32.gguf"
    assert default_name(str(tmp_path / "Tiny.F32.gguf")) == "Tiny.F32"
    with pytest.raises(CheckpointError, match=r"several GGUF models. Name one"):
        locate(str(tiny))


def test_folder_with_other_weights_too_is_not_a_gguf_model(tiny, checkpoint, tmp_path):
    for path in (*checkpoint("gpt2").iterdir(), tiny / "Tiny.F32.gguf"):
        (tmp_path / path.name).symlink_to(path)
    assert locate(str(tmp_path)) == tmp_path


@pytest.fixture(scope="module")
def hub(tiny: Path) -> Iterator[Hub]:
    hub = Hub()
    hub.add("org/tiny-GGUF", tiny)
    yield hub
    hub.close()


@pytest.fixture
def tk(
    tk_with_hub: Callable, hub: Hub, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run tk with an empty cache."""
    hub.requests.clear()
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}

    def call(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return tk_with_hub(*arguments, cwd=tmp_path, variables=settings | more)

    return call


def test_one_model_of_a_repository_is_pulled_listed_and_removed(hub, tk, tiny):
    described = json.loads(tk("show", "org/tiny-GGUF:q8_0", "--json").stdout)
    assert (described["name"], described["dtype"]) == ("org/tiny-GGUF:Q8_0", "Q8_0")
    done = tk("pull", "org/tiny-GGUF:q8_0")
    file = Path(done.stdout.strip())
    assert file.read_bytes() == (tiny / "Tiny.Q8_0.gguf").read_bytes(), done.stderr
    assert not hub.asked_for("F32.gguf")
    assert not hub.asked_for("mmproj")
    assert json.loads(tk("show", "org/tiny-GGUF:Q8_0", "--json").stdout) == described | {
        "path": str(file)
    }
    listed = json.loads(tk("models", "--json", HF_HUB_OFFLINE="1").stdout)
    (row,) = [row for row in listed if row["name"] == "org/tiny-GGUF:Q8_0"]
    assert (row["size"], row["problem"]) == (file.stat().st_size, None)
    missing = tk("pull", "org/tiny-GGUF:Q4_K_M")
    assert "It has: org/tiny-GGUF:F32, org/tiny-GGUF:Q8_0." in missing.stderr
    other = Path(tk("pull", "org/tiny-GGUF:F32").stdout.strip())
    assert tk("rm", "--yes", "org/tiny-GGUF:Q8_0").returncode == 0
    assert other.is_file()
    assert not file.exists()
    assert tk("rm", "--yes", "org/tiny-GGUF:F32").returncode == 0
    assert not other.parents[2].exists()
    assert "The cache has no model" in tk("rm", "--yes", "org/tiny-GGUF:F32").stderr


def test_show_has_the_exact_bytes_of_the_weights(tk, tiny):
    shown = json.loads(tk("show", str(tiny / "Tiny.Q8_0.gguf"), "--json").stdout)
    matrices, norms = 2 * 262 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 48), 5 * 64
    padded = 2 * 64 * 48  # down_proj has rows of 48 entries: not quantized
    quantized = matrices - padded
    assert shown["weight_bytes"] == {"Q8_0": quantized * 34 // 32, "float32": 4 * (norms + padded)}
    assert shown["bits_per_weight"] == pytest.approx(
        8 * sum(shown["weight_bytes"].values()) / (matrices + norms)
    )
    assert shown["license"] == "mit"
    assert shown["problem"] is None
