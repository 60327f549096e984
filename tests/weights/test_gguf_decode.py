"""Blocks of GGUF's types decode to the values that the `gguf` package decodes."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.gguf.file import TYPES
from toolkit.weights.gguf.decode import PLAIN, decode, dequantize
from toolkit.weights.groups import Groups

BLOCKS = json.loads((Path(__file__).parent / "gguf_blocks.json").read_text())
ROWS, COLUMNS = BLOCKS["rows"], BLOCKS["columns"]
NAMES = [kind.name for kind in TYPES.values()]


def rows_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes, values) of rows of a type."""
    stored = {key: base64.b64decode(text) for key, text in BLOCKS["types"][name].items()}
    raw = torch.frombuffer(bytearray(stored["raw"]), dtype=torch.uint8)
    values = torch.frombuffer(bytearray(stored["values"]), dtype=torch.float32)
    return raw.view(ROWS, -1), values.view(ROWS, COLUMNS)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_are_the_writers_bit_for_bit(name):
    raw, values = rows_of(name)
    decoded = dequantize(name, raw, COLUMNS)
    np.testing.assert_array_equal(decoded.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("name", sorted({*NAMES} - {*PLAIN}))
def test_quantized_types_stay_packed_in_the_bits_of_their_values(name):
    decoded = decode(name, rows_of(name)[0], COLUMNS)
    assert isinstance(decoded, Groups)
    assert decoded.shape == (ROWS, COLUMNS)
    kinds = {"Q4_0": (4, 32, 2), "Q4_1": (4, 32, 2), "Q4_K": (4, 32, 4), "Q2_K": (4, 16, 4)}
    kinds |= {"Q3_K": (4, 16, 4), "Q5_K": (8, 32, 4), "Q6_K": (8, 16, 4), "IQ4_XS": (8, 32, 4)}
    bits, size, itemsize = kinds.get(name, (8, 32, 2))
    assert (decoded.bits, decoded.size, decoded.scales.itemsize) == (bits, size, itemsize)


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_of_rows_and_whole_blocks_decodes_to_its_part(name):
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    raw, values = rows_of(name)
    columns = COLUMNS // 2 if kind.block <= COLUMNS // 2 else COLUMNS
    begin = (COLUMNS - columns) // kind.block * kind.num_bytes
    part = dequantize(name, raw[1:, begin:], columns)
    np.testing.assert_array_equal(part, values[1:, COLUMNS - columns :])


def test_extreme_exponents_of_mxfp4_are_exact():
    raw = torch.zeros(1, 17, dtype=torch.uint8)
    raw[0, 1] = 0x01  # one half in the first column
    for exponent in (0, 1, 2, 127, 254):
        raw[0, 0] = exponent
        assert dequantize("MXFP4", raw, 32)[0, 0].item() == 2.0 ** (exponent - 128)
