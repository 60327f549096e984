"""Our reader of safetensors files, against the library that writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toolkit.errors import CheckpointError
from toolkit.weights.loading import safetensors
from toolkit.weights.loading.safetensors import (
    StoredTensor,
    read_buffered,
    read_header,
    read_mapped,
)
from toolkit.weights.slots import Slot

Read = Callable[[Sequence[tuple[StoredTensor, Slot]]], None]
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SHAPES = {
    "a": (7,),
    "b": (300, 5),
    "c": (5, 300),
    "d": (1, 1000),
    "e": (2, 3, 4),
    "f": (0, 4),
    "g": (4096,),
}


@pytest.fixture(
    params=[read_mapped, partial(read_buffered, pinned=False)], ids=["mapped", "buffered"]
)
def read(request: pytest.FixtureRequest) -> Read:
    return request.param


@pytest.fixture(params=[200, 3000, None], ids=lambda size: f"chunks of {size or 'default size'}")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks smaller than a row, smaller than a tensor, and of the default size."""
    if request.param:
        monkeypatch.setattr(safetensors, "CHUNK", request.param)
        monkeypatch.setattr(safetensors, "MAPPED_CHUNK", request.param)


def write(file: Path, dtype: torch.dtype, **options: dict) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    save_file(tensors, file, **options)
    return tensors


@pytest.mark.parametrize("target", TYPES, ids=str)
@pytest.mark.parametrize("saved", TYPES, ids=str)
def test_tensors_are_read_and_converted(tmp_path, read, chunk, saved, target):
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    expected = [write(files[0], saved), write(files[1], saved, metadata={"format": "pt"})]
    stored = [read_header(file) for file in files]
    targets = [
        {t.name: torch.full(t.shape, 9.0, dtype=target) for t in tensors} for tensors in stored
    ]
    read([(t, Slot(targets[i][t.name])) for i in range(2) for t in stored[i]])
    for i in range(2):
        assert set(targets[i]) == set(SHAPES)
        for name, tensor in expected[i].items():
            torch.testing.assert_close(targets[i][name], tensor.to(target), rtol=0, atol=0)


def test_slot_can_be_a_view_or_transposed(tmp_path, read, chunk):
    expected = write(tmp_path / "x.safetensors", torch.bfloat16)
    stored = {t.name: t for t in read_header(tmp_path / "x.safetensors")}
    merged, turned = torch.zeros(700, 5), torch.zeros(5, 300)
    read([
        (stored["b"], Slot(merged[100:400])),
        (stored["b"], Slot(turned, transpose=True)),
    ])  # fmt: skip
    torch.testing.assert_close(turned, expected["b"].T.float())
    torch.testing.assert_close(merged[100:400], expected["b"].float())
    assert not merged[:100].any()
    assert not merged[400:].any()


def test_unsupported_types_are_an_error_only_if_read(tmp_path, read):
    save_file(
        {"q": torch.ones(3, dtype=torch.uint16), "w": torch.ones(3)}, tmp_path / "x.safetensors"
    )
    stored = {t.name: t for t in read_header(tmp_path / "x.safetensors")}
    read([(stored["w"], Slot(torch.zeros(3)))])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: q has the unsupported type U16"):
        read([(stored["q"], Slot(torch.zeros(3)))])


def test_file_truncated_while_reading_is_an_error(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1000)}, file)
    stored = read_header(file)
    with file.open("r+b") as stream:
        stream.truncate(2000)
    with pytest.raises(CheckpointError, match="was truncated while"):
        read_buffered([(stored[0], Slot(torch.zeros(1000)))], pinned=False)


@pytest.mark.parametrize("padding", range(4))
def test_tensors_can_start_at_any_byte(tmp_path, read, padding):
    file = tmp_path / "x.safetensors"
    text = json.dumps({"w": ENTRY}).encode() + b" " * padding
    file.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<ff", 1.5, -2.25))
    target = torch.zeros(2, dtype=torch.float64)
    read([(read_header(file)[0], Slot(target))])
    assert target.tolist() == [1.5, -2.25]


def test_reading_no_tensors(read):
    read([])


@pytest.mark.parametrize(
    "header",
    [
        [], 3, {"w": 3}, {"w": {}},
        {"w": ENTRY | {"shape": [3]}},
        {"w": ENTRY | {"shape": [-2]}},
        {"w": ENTRY | {"shape": ["two"]}},
        {"w": ENTRY | {"data_offsets": [8, 0]}},
        {"w": ENTRY | {"data_offsets": [-8, 0]}},
        {"w": ENTRY | {"data_offsets": [0]}},
        {"w": ENTRY | {"data_offsets": ["0", "8"]}},
        {"w": ENTRY | {"data_offsets": [0.0, 8.0]}},
        {"w": ENTRY | {"shape": [0, 2**63], "data_offsets": [8, 8]}},
        {"w": ENTRY, "\ud800": ENTRY},
    ],
)  # fmt: skip
def test_invalid_headers(tmp_path, header):
    file = tmp_path / "x.safetensors"
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors is not a valid safetensors file"):
        read_header(file)


def test_header_beyond_the_file_is_an_error(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(
        CheckpointError, match="cut short or not a safetensors file: it has 10 bytes"
    ):
        read_header(file)
    text = json.dumps({"w": ENTRY | {"shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=f"cut short: it has {16 + len(text)} bytes of"):
        read_header(file)
