"""Definitions of recurrent kernels against loops over tokens in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels.recurrent import Sequences, gated_delta_rule, gated_norm, short_convolution

K_HEADS, V_HEADS, K_SIZE, V_SIZE, WIDTH, SLOTS = 2, 6, 8, 5, 4, 9
LENGTHS = {"decode": (1,) * 5, "prompts": (1, 64, 65, 130, 7)}
READS, WRITES = [3, 0, 7, 7, 4], [3, 1, 2, 7, 5]
"""Slots. The first request goes on, the third and the fourth read one, the last is new."""
IS_FIRST = [False, False, False, False, True]


def sequences(lengths: tuple[int, ...]) -> Sequences:
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    is_decode = set(lengths) == {1}
    slots = torch.tensor(READS), torch.tensor(WRITES)
    keeps, after = torch.tensor([-1, 6, 8, -1, -1]), [-1, 64, 5, -1, -1]
    given = None if is_decode else starts
    return Sequences(given, *slots, torch.tensor(IS_FIRST), keeps, [] if is_decode else after)


def kept(kind: str) -> dict[int, tuple[int, int]]:
    """Return (slot, tokens) of each request's snapshot."""
    return {1: (6, 1), 2: (8, 1)} if kind == "decode" else {1: (6, 64), 2: (8, 5)}


def spans(lengths: tuple[int, ...]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("kind", LENGTHS)
def test_convolutions_go_on_from_their_windows(kind):
    torch.manual_seed(0)
    lengths, channels = LENGTHS[kind], 11
    x, weight = torch.randn(sum(lengths), channels), torch.randn(channels, WIDTH)
    windows = torch.randn(SLOTS, WIDTH - 1, channels)
    windows[READS[-1]] = torch.nan
    before = windows.clone()
    found = short_convolution(x, weight, windows, sequences(lengths))
    for index, span in enumerate(spans(lengths)):
        old = torch.zeros_like(before[0]) if IS_FIRST[index] else before[READS[index]]
        inputs = torch.cat((old, x[span])).double()
        expected = F.conv1d(inputs.T[None], weight.double()[:, None], groups=channels)[0].T
        torch.testing.assert_close(found[span], F.silu(expected).float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(windows[WRITES[index]], inputs[1 - WIDTH :].float())
        if index in kept(kind):
            slot, after = kept(kind)[index]
            expected = inputs[after : after + WIDTH - 1].float()
            torch.testing.assert_close(windows[slot], expected)
    untouched = [slot for slot in range(SLOTS) if slot not in (*WRITES, 6, 8)]
    torch.testing.assert_close(windows[untouched], before[untouched], equal_nan=True)


@pytest.mark.parametrize("kind", LENGTHS)
def test_delta_rule_equals_a_loop_in_float64(kind):
    torch.manual_seed(0)
    lengths = LENGTHS[kind]
    count = sum(lengths)
    q, k = torch.randn(2, count, K_HEADS, K_SIZE)
    v, beta = torch.randn(count, V_HEADS, V_SIZE), torch.rand(count, V_HEADS)
    decay = -torch.rand(count, V_HEADS) * 2
    decay[::3] *= 50  # forgets all
    states = torch.randn(SLOTS, V_HEADS, K_SIZE, V_SIZE)
    states[READS[-1]] = torch.nan
    before = states.clone()
    found = gated_delta_rule(q, k, v, decay, beta, states, sequences(lengths))
    unit_q, unit_k = (
        one.double() / (one.double().square().sum(-1, True) + 1e-6).sqrt() for one in (q, k)
    )
    for index, span in enumerate(spans(lengths)):
        state = torch.zeros_like(before[0]) if IS_FIRST[index] else before[READS[index]]
        state = state.double()
        slot, after = kept(kind).get(index, (0, 0))
        for token in range(span.start, span.stop):
            for head in range(V_HEADS):
                key, query = (one[token, head // (V_HEADS // K_HEADS)] for one in (unit_k, unit_q))
                own = state[head] * decay[token, head].double().exp()
                change = beta[token, head].double() * (v[token, head].double() - own.T @ key)
                state[head] = own + torch.outer(key, change)
                expected = state[head].T @ query / K_SIZE**0.5
                torch.testing.assert_close(
                    found[token, head].double(), expected, rtol=1e-4, atol=1e-5
                )
            if token - span.start + 1 == after:
                torch.testing.assert_close(states[slot].double(), state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[WRITES[index]].double(), state, rtol=1e-4, atol=1e-5)


def test_norm_is_before_the_gate():
    torch.manual_seed(0)
    x, gate, weight = torch.randn(7, 3, 5), torch.randn(7, 3, 5), torch.randn(5)
    expected = F.rms_norm(x, (5,), weight, 1e-3) * F.silu(gate)
    gated_norm(x, gate, weight, 1e-3)
    torch.testing.assert_close(x, expected)
