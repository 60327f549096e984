"""GGUF files are parsed, and wrong ones refused before anything is allocated."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from tests import gguf_writer
from tests.gguf_writer import Stored, plain, write
from toolkit.errors import CheckpointError
from toolkit.gguf.config import read_config
from toolkit.gguf.file import read_gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "é", ""],
    "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
    "tokenizer.ggml.add_bos_token": True,
    "shift": -3,
    "empty": [],
}


def tensors() -> dict[str, Stored]:
    return {
        "norm": plain(torch.arange(3.0)),
        "matrix": gguf_writer.q8_0(torch.randn(5, 64)),
        "half": plain(torch.ones(2, 3), "F16"),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", METADATA, tensors())


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_file_is_parsed(tmp_path, version, alignment):
    metadata = METADATA | {"general.alignment": alignment}
    path = write(tmp_path / "m.gguf", metadata, tensors(), version=version, alignment=alignment)
    model = read_gguf(path)
    assert {key: model.get(key, object) for key in model.metadata} == metadata
    found = [(one.name, one.type.name, one.shape, one.num_bytes) for one in model.tensors]
    assert found == [
        ("norm", "F32", (3,), 12),
        ("matrix", "Q8_0", (5, 64), 5 * 2 * 34),
        ("half", "F16", (2, 3), 12),
    ]
    content = path.read_bytes()
    for one, stored in zip(model.tensors, tensors().values(), strict=True):
        if one.name != "matrix":
            assert content[one.start : one.start + one.num_bytes] == stored.data


def test_split_model_is_read_from_any_of_its_files(tmp_path):
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    split = {"split.count": 2, "split.tensors.count": 2}
    write(parts[0], METADATA | split, {"norm": plain(torch.ones(3))})
    write(parts[1], split, {"half": plain(torch.ones(2, 3), "F16")})
    for part in parts:
        model = read_gguf(part)
        assert [(one.name, one.file) for one in model.tensors] == [
            ("norm", parts[0]),
            ("half", parts[1]),
        ]
        assert model.metadata["general.architecture"] == "llama"
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00001-of-00002\.gguf"):
        read_gguf(parts[1])


def test_every_shorter_file_is_refused(file):
    content = file.read_bytes()
    for length in range(0, len(content) - 32, 7):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut short|is empty|not a GGUF"):
            read_gguf(file)


def test_random_headers_are_read_or_refused(file):
    random.seed(0)
    content = file.read_bytes()
    for _ in range(500):
        changed = bytearray(content)
        for _ in range(random.randint(1, 4)):
            changed[random.randrange(500)] = random.choice((0, 1, 127, 255, random.randrange(256)))
        file.write_bytes(changed)
        try:
            model = read_gguf(file)
            [model.get(key, object) for key in model.metadata]
        except CheckpointError as error:
            assert str(file) in error.message  # noqa: PT017  # most raise, some are still valid


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (Stored("F32", (2**61, 8), b""), "ends at byte"),
        (Stored("F32", (2**40,), b""), "ends at byte"),
        (Stored("Q8_0", (4, 40), bytes(400)), "blocks of 32"),
        (Stored("F32", (0,), b""), "has the shape"),
        (Stored("F32", (2, 2, 2, 2, 2), bytes(128)), "5 dimensions"),
        (Stored("F32", (2,), bytes(8), offset=2**62), "ends at byte"),
        (Stored("F32", (2,), bytes(8), offset=4), "at a wrong place"),
        (Stored(16, (2, 256), bytes(400)), "unsupported type IQ2_XXS. Supported: F32"),
        (Stored(77, (2, 256), bytes(400)), "unsupported type number 77"),
    ],
)
def test_wrong_tensor_is_refused(tmp_path, stored, message):
    path = write(tmp_path / "m.gguf", METADATA, {"norm": plain(torch.ones(3)), "wrong": stored})
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is version 1 of GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "says 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(9), "a text of"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62) + bytes(9),
            "an array of 4611686018427387904 numbers",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62) + bytes(9),
            "an array of 4611686018427387904 texts",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"k", 99, 4) + bytes(9), "unknown type 99"),
    ],
)
def test_lying_header_is_refused(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_the_file_of_a_tower_is_named(tmp_path):
    metadata = METADATA | {"general.architecture": "clip"}
    path = write(tmp_path / "mmproj-m.gguf", metadata, tensors())
    with pytest.raises(CheckpointError, match=r"mmproj-m.gguf is the part .* that sees pictures"):
        read_config(read_gguf(path))
