"""Definitions of recurrent kernels against loops over tokens in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels.recurrent import Span, delta_net, gated_convolution, gated_norm

K_HEADS, V_HEADS, K_SIZE, V_SIZE, WIDTH, SLOTS, DRAFTS = 2, 4, 8, 5, 4, 9, 3
KEYS, VALUES = K_HEADS * K_SIZE, V_HEADS * V_SIZE
CHANNELS, EPS, RATE = 2 * KEYS + VALUES, 1e-3, 1.5


class Given(NamedTuple):
    """A step of several requests. Lists have a number for each of them."""

    counts: list[int]
    starts: list[int]
    begins: list[int]
    written: list[int]
    kept: list[int]
    reads: tuple[int, ...] = (3, 0, 7, 7, 4)
    writes: tuple[int, ...] = (3, 1, 2, 8, 5)  # the third and the fourth read one
    keeps: tuple[int, ...] = (-1, 6, -1, -1, -1)

    @property
    def ends(self) -> list[int]:
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def spans(self) -> list[Span]:
        firsts = [sum(self.counts[:index]) for index in range(len(self.counts))]
        columns = (firsts, self.starts, self.ends, self.begins, self.written, self.reads)
        rows = zip(*columns, self.writes, self.keeps, self.kept, strict=True)
        return [Span(*row) for row in rows]

    def tensors(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Return what kernels take: starts and lengths, then as in `attention.StateRows`."""
        starts = [sum(self.counts[:index]) for index in range(len(self.counts) + 1)]
        lists = (starts, self.ends, self.reads, self.writes, self.keeps, self.kept)
        return [
            torch.tensor(one, dtype=torch.int32, device=device)
            for one in (*lists, self.begins, self.written)
        ]


def step_of(counts: list[int], kept: int = 0) -> Given:
    """Return a step without drafts. The last request is new."""
    starts = [9, 64, 200, 2, 0]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    return Given(counts, starts, starts, ends, [0, 64 + kept, 0, 0, 0])


STEPS = {
    "decode": step_of([1] * 5, kept=1),
    "prompts": step_of([1, 129, 64, 2, 7], kept=64),
    "short prompts": step_of([1, 65, 2, 1, 7], kept=64),
    # Drafts that were right, or not; none; a tail of a prompt as long as a verified step; new ones.
    "drafts": Given([4, 4, 1, 2, 3], [9, 66, 203, 2, 0], [9, 63, 200, 2, 0], [10, 67, 204, 4, 1],
                    [0, 64, 0, 0, 0]),
    # The boundary is a draft's: a later step passes it.
    "not passed": Given([1, 4, 4, 4, 4], [9, 62, 202, 70, 0], [7, 61, 200, 70, 0],
                        [10, 63, 203, 74, 4], [0, 64, 0, 0, 0]),
}  # fmt: skip


class Net(NamedTuple):
    """Weights and tensors of a delta net."""

    kernel: torch.Tensor
    a_log: torch.Tensor
    time: torch.Tensor
    norm: torch.Tensor
    inputs: torch.Tensor
    states: torch.Tensor

    @classmethod
    def random(cls, given: Given, k_size: int = K_SIZE, v_size: int = V_SIZE) -> Net:
        channels = 2 * K_HEADS * k_size + V_HEADS * v_size
        net = cls(
            torch.randn(channels, WIDTH),
            *torch.randn(2, V_HEADS),
            torch.randn(v_size),
            torch.randn(SLOTS, WIDTH + 2 * DRAFTS, channels + 2 * V_HEADS),
            torch.randn(SLOTS, V_HEADS, k_size, v_size),
        )
        for new in (slot for slot, at in zip(given.reads, given.starts, strict=True) if at == 0):
            net.inputs[new], net.states[new] = torch.nan, torch.nan
        return net

    def run(self, y: torch.Tensor, given: Given) -> torch.Tensor:
        weights, places = self[:4], self[4:]
        return delta_net(y, *weights, EPS, RATE, *places, K_HEADS, given.spans())


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Exact(NamedTuple):
    """Outputs [num_tokens, v_heads · v_size] in float64, and the states and inputs of slots."""

    out: torch.Tensor
    states: dict[int, torch.Tensor]
    inputs: dict[tuple[int, int], torch.Tensor]  # by slot and row


def loop_over_tokens(net: Net, y: torch.Tensor, given: Given) -> Exact:
    """Compute a delta net token by token, in float64."""
    (_, v_heads, k_size, v_size), channels = net.states.shape, len(net.kernel)
    values, number = v_heads * v_size, net.inputs.shape[1]
    keys = (channels - values) // 2
    y, inputs = y.double(), net.inputs.double()
    own = torch.cat((y[:, :channels], y[:, channels + values :]), 1)
    z = y[:, channels : channels + values].view(-1, v_heads, v_size)
    exact = Exact(torch.empty(len(y), values, dtype=torch.float64), {}, {})
    for span in given.spans():
        before = torch.arange(span.begin - WIDTH + 1, span.start)
        old = inputs[span.read, before % number].masked_fill(before[:, None] < 0, 0.0)
        rows = torch.cat((old, own[span.first : span.first + span.num_tokens]))
        state = net.states[span.read].double() if span.begin else torch.zeros(1)
        state = state.double().expand(v_heads, k_size, v_size)
        for index, position in enumerate(range(span.begin, span.end)):
            taps, last = rows[index : index + WIDTH, :channels], rows[index + WIDTH - 1, channels:]
            mixed = F.silu((taps * net.kernel.double().T).sum(0))
            q, k, v = mixed.split((keys, keys, values))
            q, k = (
                unit(one.view(-1, k_size)).repeat_interleave(v_heads * k_size // keys, 0)
                for one in (q, k)
            )
            b, a = last.chunk(2)
            decay = (-net.a_log.double().exp() * F.softplus(a + net.time.double())).exp()
            state = state * decay[:, None, None]
            known = torch.einsum("hkv,hk->hv", state, k)
            change = RATE * b.sigmoid()[:, None] * (v.view(v_heads, v_size) - known)
            state = state + torch.einsum("hk,hv->hkv", k, change)
            if position >= span.start:
                token = span.first + position - span.start
                out = torch.einsum("hkv,hk->hv", state, q) / k_size**0.5
                out = F.rms_norm(out, (v_size,), net.norm.double(), EPS) * F.silu(z[token])
                exact.out[token] = out.flatten()
            for slot, at in ((span.write, span.written), (span.keep, span.kept)):
                if position + 1 == at and slot >= 0 and at <= span.written:
                    exact.states[slot] = state
                    for i in range(max(0, at - WIDTH + 1), at):
                        exact.inputs[slot, i % number] = rows[i - span.begin + WIDTH - 1]
        for i in range(span.written, span.end):  # of drafts
            exact.inputs[span.write, i % number] = rows[i - span.begin + WIDTH - 1]
    return exact


@pytest.mark.parametrize("kind", STEPS)
def test_a_delta_net_equals_a_loop_in_float64(kind):
    torch.manual_seed(0)
    given = STEPS[kind]
    net = Net.random(given)
    y = torch.randn(sum(given.counts), CHANNELS + VALUES + 2 * V_HEADS)
    before = net._replace(inputs=net.inputs.clone(), states=net.states.clone())
    exact = loop_over_tokens(before, y, given)
    found = net.run(y, given)
    torch.testing.assert_close(found.double(), exact.out, rtol=1e-3, atol=1e-4)
    for slot, state in exact.states.items():
        torch.testing.assert_close(net.states[slot].double(), state, rtol=1e-4, atol=1e-5)
    for (slot, row), kept in exact.inputs.items():
        torch.testing.assert_close(net.inputs[slot, row].double(), kept)
    passed = [span.keep for span in given.spans() if span.keeps]
    assert bool(passed) == (kind != "not passed")
    assert {*given.writes, *passed} == {*exact.states}
    untouched = [slot for slot in range(SLOTS) if slot not in exact.states]
    for mine, old in ((net.states, before.states), (net.inputs, before.inputs)):
        torch.testing.assert_close(mine[untouched], old[untouched], equal_nan=True)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_convolution_equals_that_of_pytorch(kind, has_bias):
    torch.manual_seed(0)
    given, channels = STEPS[kind], 11
    y, kernel = torch.randn(sum(given.counts), 3 * channels), torch.randn(channels, WIDTH)
    bias = torch.randn(channels) if has_bias else None
    inputs = torch.randn(SLOTS, WIDTH + 2 * DRAFTS, channels)
    old = inputs.clone()
    found = gated_convolution(y, kernel, bias, inputs, given.spans())
    b, c, x = y.chunk(3, 1)
    for span in given.spans():
        own = slice(span.first, span.first + span.num_tokens)
        where = torch.arange(span.start - WIDTH + 1, span.start)
        before = old[span.read, where % len(old[0])].where(where[:, None] >= 0, 0.0)
        rows = torch.cat((before, (b * x)[own])).double()
        wanted = F.conv1d(rows.T[None], kernel.double()[:, None], groups=channels)[0].T
        wanted = wanted if bias is None else wanted + bias
        torch.testing.assert_close(found[own], (c[own] * wanted).float(), rtol=1e-4, atol=1e-5)
        for slot, at, end in (
            (span.write, span.written, span.end), (span.keep, span.kept, span.kept)
        ):  # fmt: skip
            if slot >= 0 and at <= span.written:
                for position in range(max(0, at - WIDTH + 1), end):
                    expected = (
                        old[span.read, position % len(old[0])]
                        if position < span.start - WIDTH + 1
                        else rows[position - span.start + WIDTH - 1].float()
                    )
                    torch.testing.assert_close(inputs[slot, position % len(old[0])], expected)


def test_norm_is_before_the_gate():
    torch.manual_seed(0)
    x, gate, weight = torch.randn(7, 3, 5), torch.randn(7, 3, 5), torch.randn(5)
    expected = F.rms_norm(x, (5,), weight, 1e-3) * F.silu(gate)
    gated_norm(x, gate, weight, 1e-3)
    torch.testing.assert_close(x, expected)
