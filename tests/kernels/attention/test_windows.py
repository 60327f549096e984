"""Attention within short segments: the reference against PyTorch, Triton against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels import reference

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
LENGTHS = (64, 1, 17, 33)  # of segments


def heads(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return queries, keys and values of three heads."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(sum(LENGTHS), 3, 3, size, generator=generator).to(device, dtype)


def angles(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    found = 6 * torch.rand(sum(LENGTHS), size // 2, generator=torch.Generator().manual_seed(1))
    return torch.stack((found.cos(), found.sin()), dim=1).to(device)


def starts(device: torch.device | str = "cpu") -> torch.Tensor:
    ends = torch.tensor(LENGTHS, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.pad(ends, (1, 0)).to(device)


def test_reference_rotates_halves_in_place():
    given, table = heads(8, torch.float32), angles(8)
    rotated = given.clone()
    reference.rotate_(rotated[:, :2], table)
    turned = torch.polar(torch.ones(()), torch.atan2(table[:, 1], table[:, 0]))[:, None, None]
    for part in (0, 1):
        found = torch.complex(*given[:, part : part + 1].chunk(2, -1)) * turned
        expected = torch.cat((found.real, found.imag), dim=-1)[:, 0]
        torch.testing.assert_close(rotated[:, part], expected)
    assert torch.equal(rotated[:, 2], given[:, 2])


def test_reference_attends_within_segments():
    given, begin = heads(8, torch.float32), 0
    found = reference.attend_segments(given, None, starts())
    for length in LENGTHS:
        q, k, v = given[begin : begin + length].permute(1, 2, 0, 3)
        expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1)
        torch.testing.assert_close(found[begin : begin + length], expected)
        begin += length


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(72, torch.bfloat16), (80, torch.float16)])
def test_short_attention_equals_reference(triton, device, size, dtype, rotated):
    from toolkit.kernels.triton.attention import windows

    given, table = heads(size, dtype, device), angles(size, device) if rotated else None
    found = windows.attend_short(given, table, starts(device))
    expected = reference.attend_segments(given, table, starts(device))
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [16, 72])
def test_rotation_equals_reference(triton, device, size):
    from toolkit.kernels.triton.attention import rotary

    found, expected = heads(size, torch.float32, device), heads(size, torch.float32, device)
    rotary.rotate_(found[:, :2], angles(size, device))
    reference.rotate_(expected[:, :2], angles(size, device))
    torch.testing.assert_close(found, expected)
