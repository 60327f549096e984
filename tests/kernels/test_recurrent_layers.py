"""The GPU kernels of gated delta nets and short convolutions against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.test_recurrent import (
    IS_FIRST,
    K_HEADS,
    LENGTHS,
    READS,
    SLOTS,
    V_HEADS,
    WIDTH,
    kept,
    sequences,
)
from toolkit.kernels.recurrent import (
    Sequences,
    gated_delta_rule,
    gated_norm,
    short_convolution,
)

pytest.importorskip("triton")

RATE = 1.5


@pytest.fixture(scope="module")
def kernels(triton):
    from toolkit.kernels.table import TritonKernels

    return TritonKernels()


def step_of(kernels, given: Sequences, kind: str, device: torch.device):
    lengths = torch.tensor(LENGTHS[kind])
    starts = torch.tensor([0, *lengths.cumsum(0).tolist()])
    totals = lengths + torch.tensor([0 if first else 9 for first in IS_FIRST])
    after = torch.tensor([kept(kind).get(index, (0, -1))[1] for index in range(5)])
    tensors = (starts, totals, given.reads, given.writes, given.keeps, after)
    there = [one.int().to(device) for one in tensors]
    return kernels.recurrent_step(*there[:2], int(lengths.sum()), int(lengths.max()), *there[2:])


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("k_size", "v_size"), [(8, 5), (16, 48)])
def test_kernels_compute_a_delta_net(
    kernels, device, monkeypatch, kind, dtype, state_dtype, k_size, v_size
):
    """Heads smaller than a block of columns, and of several and a part of one."""
    torch.manual_seed(0)
    lengths = LENGTHS[kind]
    keys, values = K_HEADS * k_size, V_HEADS * v_size
    channels, eps = 2 * keys + values, 1e-3
    widths = channels, values, V_HEADS, V_HEADS
    y = torch.randn(sum(lengths), sum(widths)).to(dtype)
    kernel, norm = torch.randn(channels, WIDTH).to(dtype), torch.randn(v_size).to(dtype)
    a_log, time = torch.randn(2, V_HEADS)
    windows = torch.randn(SLOTS, WIDTH - 1, channels).to(dtype)
    states = torch.randn(SLOTS, V_HEADS, k_size, v_size).to(state_dtype)
    states[READS[-1]], windows[READS[-1]] = torch.nan, torch.nan
    own_windows, own_states = windows.to(device, copy=True), states.to(device, copy=True)

    given = sequences(lengths)
    qkv, z, b, a = torch.split(y, widths, dim=1)
    mixed = short_convolution(qkv, kernel, windows, given)
    q, k, v = torch.split(mixed, (keys, keys, values), dim=1)
    expected = gated_delta_rule(
        *(one.reshape(-1, K_HEADS, k_size) for one in (q, k)),
        v.reshape(-1, V_HEADS, v_size),
        -a_log.exp() * F.softplus(a.float() + time),
        RATE * b.float().sigmoid(),
        states,
        given,
    )
    gated_norm(expected, z.reshape(expected.shape), norm, eps)

    if v_size > 16:  # several blocks of columns, as with many requests
        monkeypatch.setattr("toolkit.kernels.triton.recurrent.delta_net.FEW_PROGRAMS", 0)
        monkeypatch.setattr("toolkit.kernels.triton.recurrent.delta_net.VALUES_AT_ONCE", 32)
    weights = (one.to(device) for one in (kernel, a_log, time, norm))
    layer = kernels.delta_net(*weights, eps, RATE, own_windows, own_states, K_HEADS)
    found = layer(y.to(device), step_of(kernels, given, kind, device)).cpu()
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, expected.flatten(1), **bound)
    torch.testing.assert_close(own_windows.cpu(), windows, equal_nan=True)
    torch.testing.assert_close(own_states.cpu(), states, equal_nan=True, **bound)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", LENGTHS)
def test_kernels_compute_a_gated_convolution(kernels, device, kind, has_bias):
    torch.manual_seed(0)
    channels, lengths = 200, LENGTHS[kind]
    y = torch.randn(sum(lengths), 3 * channels)
    kernel, bias = torch.randn(channels, WIDTH), torch.randn(channels) if has_bias else None
    windows = torch.randn(SLOTS, WIDTH - 1, channels)
    windows[READS[-1]] = torch.nan
    own_windows = windows.to(device, copy=True)
    given = sequences(lengths)
    b, c, x = y.chunk(3, 1)
    expected = c * short_convolution(b * x, kernel, windows, given, bias, has_silu=False)
    there = (None if one is None else one.to(device) for one in (y, kernel, bias))
    step = step_of(kernels, given, kind, device)
    found = kernels.gated_convolution(*there, own_windows, step).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_windows.cpu(), windows, equal_nan=True)


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_like_keys_do_not_grow(kernels, device, rate):
    """A prompt of one repeated token: powers of its system have entries of 1e17."""
    torch.manual_seed(0)
    length, size = 130, 16
    y = torch.randn(1, 4 * size + 2).repeat(length, 1)
    y[:, -2:] = torch.tensor([9.0, -30.0])  # replace all, keep all
    kernel = torch.zeros(3 * size, 1)
    kernel[:, 0] = 1.0
    states = torch.randn(1, 1, size, size)
    windows = torch.zeros(1, 0, 3 * size)
    ones, zeros = torch.ones(size), torch.zeros(1)
    starts, slot, none = torch.tensor([0, length]), torch.tensor([0]), torch.tensor([-1])
    tensors = (starts, torch.tensor([length + 9]), slot, slot, none, none)
    expected, own = states.double(), states.to(device, copy=True)
    _, k, v = F.silu(y[0, : 3 * size].double()).chunk(3)
    k = k / k.norm()
    for _ in range(length):
        update = (v - expected[0, 0].T @ k) * rate * torch.tensor(9.0).double().sigmoid()
        expected[0, 0] += k[:, None] * update
    there = [one.int().to(device) for one in tensors]
    step = kernels.recurrent_step(*there[:2], length, length, *there[2:])
    weights = (one.to(device) for one in (kernel, zeros, zeros, ones))
    kernels.delta_net(*weights, 1e-6, rate, windows.to(device), own, 1)(y.to(device), step)
    torch.testing.assert_close(own.cpu(), expected.float(), rtol=1e-4, atol=1e-4)
