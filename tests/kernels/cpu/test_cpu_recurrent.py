"""The CPU kernels of gated delta nets against their definitions."""

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
from toolkit.kernels import cpu
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import (
    Sequences,
    gated_delta_rule,
    gated_norm,
    short_convolution,
)


def step_of(given: Sequences, kind: str) -> recurrent.RecurrentStep:
    lengths = torch.tensor(LENGTHS[kind])
    starts = torch.tensor([0, *lengths.cumsum(0).tolist()])
    totals = lengths + torch.tensor([0 if first else 9 for first in IS_FIRST])
    after = torch.tensor([kept(kind).get(index, (0, -1))[1] for index in range(5)])
    tensors = starts, totals, given.reads, given.writes, given.keeps, after
    return recurrent.RecurrentStep(*(one.int() for one in tensors))


pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.problem()))
RATE = 1.5


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("dtype", recurrent.DTYPES)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("k_size", "v_size"), [(8, 5), (16, 80)])
def test_cpu_kernel_computes_the_layer(kind, dtype, variant, k_size, v_size):
    """Heads smaller than a vector, and of several and a part of one."""
    torch.manual_seed(0)
    lengths, group = LENGTHS[kind], V_HEADS // K_HEADS
    keys, values = K_HEADS * k_size, V_HEADS * v_size
    channels, eps = 2 * keys + values, 1e-3
    widths = channels, values, V_HEADS, V_HEADS
    y = torch.randn(sum(lengths), sum(widths)).to(dtype)
    kernel, norm = torch.randn(channels, WIDTH), torch.randn(v_size)
    a_log, time = torch.randn(2, V_HEADS)
    windows = torch.randn(SLOTS, WIDTH - 1, channels).to(dtype)
    states = torch.randn(SLOTS, V_HEADS, k_size, v_size)
    states[READS[-1]], windows[READS[-1]] = torch.nan, torch.nan
    own_windows, own_states = windows.clone(), states.clone()

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

    step = step_of(given, kind)
    with cpu.using(variant):
        layer = recurrent.DeltaNet(
            kernel, a_log, time, norm, eps, RATE, own_windows, own_states, K_HEADS
        )
        found = layer(y, step)
    assert group == 3
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, expected.flatten(1), **bound)
    torch.testing.assert_close(own_windows, windows, equal_nan=True)
    torch.testing.assert_close(own_states, states, equal_nan=True, **bound)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("dtype", recurrent.DTYPES)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("channels", "has_bias"), [(11, True), (600, False)])
def test_cpu_kernel_computes_a_gated_convolution(kind, dtype, variant, channels, has_bias):
    """Channels of a part of a vector, and of several tasks."""
    torch.manual_seed(0)
    lengths = LENGTHS[kind]
    y = torch.randn(sum(lengths), 3 * channels).to(dtype)
    kernel, bias = torch.randn(channels, WIDTH), torch.randn(channels) if has_bias else None
    windows = torch.randn(SLOTS, WIDTH - 1, channels).to(dtype)
    windows[READS[-1]] = torch.nan
    own_windows, given = windows.clone(), sequences(lengths)
    b, c, x = y.chunk(3, 1)
    expected = c * short_convolution(b * x, kernel, windows, given, bias, has_silu=False)
    with cpu.using(variant):
        layer = recurrent.GatedConvolution(kernel, bias, own_windows)
        found = layer(y, step_of(given, kind))
    bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, expected, **bound)
    torch.testing.assert_close(own_windows, windows, equal_nan=True)


@pytest.mark.parametrize("dtype", recurrent.DTYPES)
def test_gates_multiply_rows(dtype):
    torch.manual_seed(0)
    rows = torch.randn(7, 50).to(dtype)
    x, gate = rows[:, :21].contiguous(), rows[:, 29:]
    expected = x.float() * gate.float().sigmoid()
    recurrent.gate_rows(x, gate)
    torch.testing.assert_close(x.float(), expected, rtol=0.01, atol=0.01)
