"""The CPU kernels of gated delta nets and short convolutions against their definitions."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_recurrent import (
    DRAFTS,
    EPS,
    K_HEADS,
    RATE,
    SLOTS,
    STEPS,
    V_HEADS,
    WIDTH,
    Given,
    Net,
)
from toolkit.kernels import cpu
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import gated_convolution

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.problem()))


def step_of(given: Given) -> recurrent.RecurrentStep:
    tensors = given.tensors()
    has_drafts = given.begins != given.starts or given.written != given.ends
    return recurrent.RecurrentStep(*(tensors if has_drafts else tensors[:-2]))


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("dtype", recurrent.DTYPES)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("k_size", "v_size"), [(8, 5), (16, 80)])
def test_cpu_kernel_computes_the_layer(kind, dtype, variant, k_size, v_size):
    """Heads smaller than a vector, and of several and a part of one."""
    torch.manual_seed(0)
    given = STEPS[kind]
    net = Net.random(given, k_size, v_size)
    net = net._replace(inputs=net.inputs.to(dtype))
    columns = net.inputs.shape[2] + V_HEADS * v_size
    y = torch.randn(sum(given.counts), columns).to(dtype)
    inputs, states = net.inputs.clone(), net.states.clone()
    expected = net.run(y, given)
    with cpu.using(variant):
        layer = recurrent.DeltaNet(*net[:4], EPS, RATE, inputs, states, K_HEADS)
        found = layer(y, step_of(given))
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, expected, **bound)
    torch.testing.assert_close(inputs, net.inputs, equal_nan=True)
    torch.testing.assert_close(states, net.states, equal_nan=True, **bound)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("dtype", recurrent.DTYPES)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("channels", "has_bias"), [(11, True), (600, False)])
def test_cpu_kernel_computes_a_gated_convolution(kind, dtype, variant, channels, has_bias):
    """Channels of a part of a vector, and of several tasks."""
    torch.manual_seed(0)
    given = STEPS[kind]
    y = torch.randn(sum(given.counts), 3 * channels).to(dtype)
    kernel, bias = torch.randn(channels, WIDTH), torch.randn(channels) if has_bias else None
    inputs = torch.randn(SLOTS, WIDTH + 2 * DRAFTS, channels).to(dtype)
    inputs[given.reads[-1]] = torch.nan
    own = inputs.clone()
    expected = gated_convolution(y, kernel, bias, inputs, given.spans())
    with cpu.using(variant):
        found = recurrent.GatedConvolution(kernel, bias, own)(y, step_of(given))
    bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, expected, **bound)
    torch.testing.assert_close(own, inputs, equal_nan=True)


@pytest.mark.parametrize("dtype", recurrent.DTYPES)
def test_gates_multiply_rows(dtype):
    torch.manual_seed(0)
    rows = torch.randn(7, 50).to(dtype)
    gate = rows[:, 29:]
    for multiply, factor in (
        (recurrent.gate_rows, gate.float().sigmoid()),
        (recurrent.multiply_rows, gate.float()),
    ):
        x = rows[:, :21].contiguous()
        expected = x.float() * factor
        multiply(x, gate)
        torch.testing.assert_close(x.float(), expected, rtol=0.01, atol=0.01)
