"""The GPU kernels of gated delta nets and short convolutions against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
    loop_over_tokens,
)
from toolkit.kernels.recurrent import gated_convolution

pytest.importorskip("triton")


LONG = ("prompts", "drafts")
"""Steps that are computed in float32."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8}
"""Relative errors at most. In bf16: of four values that are rounded, one after the other.

Twice that in Triton's interpreter, which rounds towards zero."""


def away(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error of all entries together."""
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def kernels(triton):
    from toolkit.kernels.table import TritonKernels

    return TritonKernels()


def step_of(kernels, given: Given, device: torch.device):
    starts, lengths, *others = given.tensors(device)
    has_drafts = given.begins != given.starts or given.written != given.ends
    others = others if has_drafts else others[:-2]
    numbers = sum(given.counts), max(given.counts), 1 + DRAFTS * has_drafts
    return kernels.recurrent_step(starts, lengths, *numbers, *others)


@pytest.mark.parametrize(
    ("kind", "dtype", "state_dtype", "k_size", "v_size"),
    [
        *((kind, torch.float32, torch.float32, 16, 48) for kind in STEPS if "short" not in kind),
        *((kind, torch.bfloat16, torch.float32, 8, 5) for kind in STEPS if kind not in LONG),
        ("drafts", torch.bfloat16, torch.bfloat16, 8, 5),
    ],
)
def test_kernels_compute_a_delta_net(kernels, device, kind, dtype, state_dtype, k_size, v_size):
    """Heads smaller than a block of columns, and of several and a part of one."""
    torch.manual_seed(0)
    given = STEPS[kind]
    net = Net.random(given, k_size, v_size)
    rounded = [one.to(dtype) for one in (net.kernel, net.norm, net.inputs)]
    net = Net(rounded[0], net.a_log, net.time, *rounded[1:], net.states.to(state_dtype))
    channels = len(net.kernel)
    y = torch.randn(sum(given.counts), net.inputs.shape[2] + V_HEADS * v_size).to(dtype)
    *weights, inputs, states = (one.to(device, copy=True) for one in net)
    exact = loop_over_tokens(net, y, given)
    net.run(y, given)
    layer = kernels.delta_net(*weights, EPS, RATE, inputs, states, K_HEADS)
    found = layer(y.to(device), step_of(kernels, given, device)).cpu()
    states, bound = states.cpu(), BOUNDS[dtype] * (1 if device.type == "cuda" else 2)
    assert away(found, exact.out) < bound
    for slot, right in exact.states.items():
        assert away(states[slot], right) < bound
    untouched = [slot for slot in range(SLOTS) if slot not in exact.states]
    assert torch.equal(states[untouched].nan_to_num(), net.states[untouched].nan_to_num())
    for slot in range(SLOTS):
        span = next((span for span in given.spans() if span.write == slot), None)
        rows = torch.arange(inputs.shape[1])
        of_drafts = rows[:0] if span is None else torch.arange(span.written, span.end) % len(rows)
        mine, right = inputs[slot].cpu(), net.inputs[slot]
        torch.testing.assert_close(mine[:, :channels], right[:, :channels], equal_nan=True)
        # Gates of other tokens are not read again.
        torch.testing.assert_close(mine[of_drafts], right[of_drafts])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in STEPS if kind != "prompts"])
def test_kernels_compute_a_gated_convolution(kernels, device, kind, has_bias):
    torch.manual_seed(0)
    given, channels = STEPS[kind], 200
    y = torch.randn(sum(given.counts), 3 * channels)
    kernel, bias = torch.randn(channels, WIDTH), torch.randn(channels) if has_bias else None
    inputs = torch.randn(SLOTS, WIDTH + 2 * DRAFTS, channels)
    inputs[given.reads[-1]] = torch.nan
    own = inputs.to(device, copy=True)
    expected = gated_convolution(y, kernel, bias, inputs, given.spans())
    weights = (None if one is None else one.to(device) for one in (kernel, bias))
    layer = kernels.gated_convolution(*weights, own)
    found = layer(y.to(device), step_of(kernels, given, device)).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.cpu(), inputs, equal_nan=True)


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_like_keys_do_not_grow(kernels, device, rate):
    """A prompt of one repeated token: powers of its system have entries of 1e17.

    At a rate of 2 the terms of products cancel each other."""
    torch.manual_seed(0)
    length, size = 130, 16
    y = torch.randn(1, 4 * size + 2).repeat(length, 1)
    y[:, -2:] = torch.tensor([9.0, -30.0])  # replace all, keep all
    kernel = torch.zeros(3 * size, 1)
    kernel[:, 0] = 1.0
    states = torch.randn(1, 1, size, size)
    inputs = torch.zeros(1, 1, 3 * size + 2)
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
    step = kernels.recurrent_step(*there[:2], length, length, 1, *there[2:])
    weights = (one.to(device) for one in (kernel, zeros, zeros, ones))
    kernels.delta_net(*weights, 1e-6, rate, inputs.to(device), own, 1)(y.to(device), step)
    found, bound = own.cpu(), {"rtol": 1e-4, "atol": 1e-4}
    if device.type == "cuda" and rate == 2.0:
        torch.testing.assert_close(found, expected.float(), rtol=1e-2, atol=1e-2)
        if not torch.allclose(found, expected.float(), **bound):
            pytest.xfail("products of tensor cores in tf32x3 lose three digits of fp32")
    torch.testing.assert_close(found, expected.float(), **bound)
