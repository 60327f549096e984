"""Definitions of recurrent kernels against loops over tokens in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels.recurrent import Span, delta_net, gated_convolution, gated_norm

K_HEADS, V_HEADS, K_SIZE, V_SIZE, WIDTH, SLOTS, DRAFTS = 2, 6, 8, 5, 4, 9, 3
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
    "prompts": step_of([1, 65, 64, 130, 7], kept=64),
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


@pytest.mark.parametrize("kind", STEPS)
def test_a_delta_net_equals_a_loop_in_float64(kind):
    torch.manual_seed(0)
    given = STEPS[kind]
    net = Net.random(given)
    y = torch.randn(sum(given.counts), CHANNELS + VALUES + 2 * V_HEADS)
    before = net._replace(inputs=net.inputs.clone(), states=net.states.clone())
    found = net.run(y, given)
    own = torch.cat((y[:, :CHANNELS], y[:, CHANNELS + VALUES :]), 1).double()
    for span in given.spans():
        number = before.inputs.shape[1]

        def row(position: int, span: Span = span, number: int = number) -> torch.Tensor:
            if position < 0:
                return torch.zeros(CHANNELS + 2 * V_HEADS, dtype=torch.float64)
            if position < span.start:
                return before.inputs[span.read, position % number].double()
            return own[span.first + position - span.start]

        state = before.states[span.read].double() if span.begin else torch.zeros_like(own[0, 0])
        state = state.expand(V_HEADS, K_SIZE, V_SIZE).clone()
        for position in range(span.begin, span.end):
            taps = torch.stack([row(position - WIDTH + 1 + i)[:CHANNELS] for i in range(WIDTH)])
            mixed = F.silu((taps * net.kernel.T).sum(0))
            q, k, v = mixed.split((KEYS, KEYS, VALUES))
            q, k = (unit(one.view(K_HEADS, K_SIZE)) for one in (q, k))
            b, a = row(position)[CHANNELS:].chunk(2)
            decay = (-net.a_log.exp() * F.softplus(a + net.time)).exp()
            for head in range(V_HEADS):
                key, query = (one[head // (V_HEADS // K_HEADS)] for one in (k, q))
                value, known = v.view(V_HEADS, V_SIZE)[head], state[head] * decay[head]
                change = RATE * b[head].sigmoid() * (value - known.T @ key)
                state[head] = known + torch.outer(key, change)
                if position >= span.start:
                    token = span.first + position - span.start
                    out = state[head].T @ query / K_SIZE**0.5
                    z = y[token, CHANNELS : CHANNELS + VALUES].view(V_HEADS, V_SIZE)[head]
                    out = F.rms_norm(out, (V_SIZE,), net.norm.double(), EPS) * F.silu(z.double())
                    mine = found[token].view(V_HEADS, V_SIZE)[head]
                    torch.testing.assert_close(mine.double(), out, rtol=1e-3, atol=1e-4)
            for slot, at in ((span.write, span.written), (span.keep, span.kept)):
                if position + 1 == at and slot >= 0 and at <= span.written:
                    torch.testing.assert_close(
                        net.states[slot].double(), state, rtol=1e-4, atol=1e-5
                    )
                    for known in range(max(0, at - WIDTH + 1), at):
                        torch.testing.assert_close(
                            net.inputs[slot, known % number].double(), row(known)
                        )
        for position in range(span.written, span.end):  # of drafts
            torch.testing.assert_close(
                net.inputs[span.write, position % number].double(), row(position)
            )
    passed = [span.keep for span in given.spans() if span.keeps]
    assert bool(passed) == (kind != "not passed")
    untouched = [slot for slot in range(SLOTS) if slot not in (*given.writes, *passed)]
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
