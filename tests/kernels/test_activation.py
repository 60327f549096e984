"""Activations: the reference against the formulas, Triton against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.kernels import reference

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 8e-3}
FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_quick": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.fixture(scope="session")
def activations(triton):
    from toolkit.kernels.triton import activation

    return activation


@pytest.mark.parametrize("kind", FORMULAS)
def test_reference_equals_the_formula(kind):
    x = torch.linspace(-6, 6, 101)
    expected = torch.tensor([FORMULAS[kind](value) for value in x.tolist()])
    torch.testing.assert_close(reference.activation(x, kind), expected, rtol=1e-5, atol=1e-6)
    up = torch.linspace(1, 2, 101)
    gate_up = torch.cat((x, up))[None]
    torch.testing.assert_close(
        reference.gated_activation(gate_up, kind)[0], expected * up, rtol=1e-5, atol=1e-6
    )


@pytest.mark.on_cpu(
    "(1, 1)-torch.bfloat16-silu",
    "(1, 1)-torch.bfloat16-relu",
    "(1, 1)-torch.bfloat16-relu2",
    "(3, 100)-torch.float16-gelu",
    "(2, 1024)-torch.float32-gelu_tanh",
    "(5, 2500)-torch.bfloat16-gelu_quick",
)
@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1), BF16), ((3, 100), FP16), ((2, 1024), FP32), ((5, 2500), BF16)],
    ids=str,
)
def test_triton_equals_reference(activations, device, shape, dtype, kind):
    torch.manual_seed(0)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    torch.testing.assert_close(
        activations.activation(x, kind), reference.activation(x, kind), **tolerance
    )
    gate_up = (3 * torch.randn(shape[0], 2 * shape[1], device=device)).to(dtype)
    expected = reference.gated_activation(gate_up, kind)
    torch.testing.assert_close(activations.gated_activation(gate_up, kind), expected, **tolerance)
    out = torch.full_like(expected, float("nan"))
    assert activations.gated_activation(gate_up, kind, out=out) is out
    torch.testing.assert_close(out, expected, **tolerance)


@pytest.mark.parametrize("kind", FORMULAS)
def test_extreme_values_stay_finite_and_nan_stays_nan(activations, device, kind):
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, float("nan")], device=device)
    y = activations.activation(x, kind)
    expected = torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4])
    expected = expected.square() if kind == "relu2" else expected
    torch.testing.assert_close(y[:5].cpu(), expected, rtol=0, atol=1e-6)
    assert y[5].isnan()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_are_capped_in_place(activations, device, dtype):
    torch.manual_seed(0)
    padded = (40 * torch.randn(3, 1300, device=device)).to(dtype)
    expected = padded.clone()
    expected[:, :1100] = (30 * torch.tanh(padded[:, :1100].double() / 30)).to(dtype)
    for apply in (reference.soft_cap_, activations.soft_cap_):
        found = padded.clone()
        apply(found[:, :1100], 30.0)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    extreme = torch.tensor([[-torch.inf, torch.inf, 1e30, torch.nan]], device=device)
    activations.soft_cap_(extreme, 5.0)
    expected = torch.tensor([[-5.0, 5.0, 5.0, torch.nan]])
    torch.testing.assert_close(extreme.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gates_multiply_rows(activations, device, dtype):
    torch.manual_seed(0)
    rows = torch.randn(3, 2500, device=device).to(dtype)
    gate = rows[:, 1400:]
    for multiply, factor in (
        (activations.gate_rows, gate.double().sigmoid()),
        (activations.multiply_rows, gate.double()),
    ):
        x = rows[:, :1100].contiguous()
        expected = (x.double() * factor).to(dtype)
        multiply(x, gate[:, :1100])
        torch.testing.assert_close(x, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_rows_are_added(activations, device, dtype):
    torch.manual_seed(0)
    y, shared = torch.randn(2, 3, 1100, device=device).to(dtype)
    x, gate = torch.randn(3, 2500, device=device).to(dtype), torch.randn(1, 2500, device=device)
    gate = (gate / 50).to(dtype)
    share = (x.double() @ gate.double().T).sigmoid()
    expected = (y.double() + share * shared.double()).to(dtype)
    activations.add_gated(y, shared, x, gate)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_unsupported_inputs_are_errors(activations):
    with pytest.raises(ValueError, match="'tanh' is not one of silu"):
        activations.activation(torch.ones(2, 4), "tanh")
    with pytest.raises(ValueError, match="contiguous"):
        activations.gated_activation(torch.ones(4, 8).T, "silu")
    with pytest.raises(ValueError, match="each row of the logits"):
        activations.soft_cap_(torch.ones(4, 8).T, 5.0)
