"""Definitions of the kernels of layers with a state for each request, in plain PyTorch.

A step's tokens are packed, request after request. Each request has slots, where its state is read
and written, and where the inputs of its last tokens are: of the token at position p in row
p % rows, for the convolution and for drafts. A draft's update waits there until a later step knows
that it was accepted: the state is read once in a step, and written once, with certain tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens of a prompt that are computed together
EPS = 1e-6  # of the norm of queries and keys


class Span(NamedTuple):
    """A request in a step. Positions are those of its tokens in its sequence.

    No slot that is written is another request's."""

    first: int  # the step's row of its first token
    start: int  # position of its first token
    end: int  # position after its last
    begin: int  # number of tokens in the state that is read: drafts from here to `start` are right
    written: int  # number of tokens in the state that is written: drafts are beyond
    read: int  # slot
    write: int
    keep: int  # slot of a snapshot; negative: none
    kept: int  # number of tokens in the snapshot, if the step passes it

    @property
    def keeps(self) -> bool:
        """True if the snapshot is written."""
        return self.keep >= 0 and self.begin < self.kept <= self.written

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def delta_net(
    y: torch.Tensor,
    kernel: torch.Tensor,
    a_log: torch.Tensor,
    time: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rate: float,
    inputs: torch.Tensor,
    states: torch.Tensor,
    num_k_heads: int,
    spans: Iterable[Span],
) -> torch.Tensor:
    """Return the output of a gated delta net, [num_tokens, v_heads · v_size].

    y: [num_tokens, q | k | v | z | b | a]; kernel: [channels, width], of q, k and v; a_log, time:
    [v_heads]; norm: [v_size]; rate: see `describe.DeltaNet`; inputs: [slots, rows, q | k | v | b |
    a], at least width + 2 · drafts rows; states: [slots, v_heads, k_size, v_size]."""
    _, v_heads, k_size, v_size = states.shape
    (channels, width), keys, values = kernel.shape, num_k_heads * k_size, v_heads * v_size
    own = torch.cat((y[:, :channels], y[:, channels + values :]), 1)
    out = torch.empty(len(y), v_heads, v_size, dtype=y.dtype, device=y.device)
    for span in spans:
        rows = _recall(own, inputs, span, width - 1)
        q, k, v = torch.split(convolve(rows[:, :channels], kernel), [keys, keys, values], 1)
        b, a = rows[width - 1 :, channels:].float().chunk(2, 1)
        before = states[span.read].float() if span.begin else torch.zeros_like(states[0]).float()
        found, after = gated_delta_rule(
            q.reshape(-1, num_k_heads, k_size),
            k.reshape(-1, num_k_heads, k_size),
            v.reshape(-1, v_heads, v_size),
            -a_log.exp() * F.softplus(a + time),
            rate * b.sigmoid(),
            before,
            {span.written - span.begin, span.kept - span.begin},
        )
        out[span.first : span.first + span.num_tokens] = found[span.start - span.begin :]
        states[span.write] = after[span.written - span.begin].to(states.dtype)
        if span.keeps:
            states[span.keep] = after[span.kept - span.begin].to(states.dtype)
        _remember(rows, inputs, span, width - 1)
    z = y[:, channels : channels + values].reshape(out.shape)
    gated_norm(out, z, norm, eps)
    return out.flatten(1)


def gated_convolution(
    y: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    spans: Iterable[Span],
) -> torch.Tensor:
    """Return c · (convolution of b · x), [num_tokens, channels]. y: [num_tokens, b | c | x].

    kernel: [channels, width]; inputs: [slots, rows, channels], as in `delta_net`."""
    b, c, x = y.chunk(3, 1)
    own, before = b * x, kernel.shape[1] - 1
    out = torch.empty_like(own)
    for span in spans:
        rows = _recall(own, inputs, span, before)
        found = convolve(rows, kernel, bias, has_silu=False)
        out[span.first : span.first + span.num_tokens] = found[span.start - span.begin :]
        _remember(rows, inputs, span, before)
    return c * out


def convolve(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Return the causal convolution of each channel, and silu of it, [num_tokens, channels].

    x: [width - 1 + num_tokens, channels], with the inputs before; kernel: [channels, width]."""
    parts = x.float().unfold(0, kernel.shape[1], 1)  # [tokens, channels, width]
    y = (parts * kernel.float()).sum(2)
    y = y if bias is None else y + bias
    return (F.silu(y) if has_silu else y).to(x.dtype)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    stops: Iterable[int] = (),
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return the outputs [num_tokens, v_heads, v_size] of a gated delta net (arXiv:2412.06464).

    And the states after as many tokens as each of `stops` says. For each token: S = exp(decay) · S;
    S = S + k (beta · (v - Sᵀ k))ᵀ; the output is Sᵀ q / sqrt(k_size), with queries and keys of
    length 1. Consecutive heads of values share one of queries and keys. q, k: [num_tokens, k_heads,
    k_size]; decay, beta: [num_tokens, v_heads] fp32; state: fp32 [v_heads, k_size, v_size]."""
    dtype, group = v.dtype, v.shape[1] // k.shape[1]
    q, k = (_unit(one).repeat_interleave(group, 1) for one in (q, k))
    q, v, out = q * q.shape[-1] ** -0.5, v.float(), torch.empty_like(v)
    places = sorted({0, len(q)} | {one for one in stops if 0 < one < len(q)})
    states: dict[int, torch.Tensor] = {}
    for first, last in pairwise(places):
        for at in range(first, last, CHUNK):
            part = slice(at, min(at + CHUNK, last))
            own, state = _chunk(q[part], k[part], v[part], decay[part], beta[part], state)
            out[part] = own.to(dtype)
        states[last] = state
    return out, states


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Replace x [..., size] by weight · rms_norm(x) · silu(gate)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    x.copy_(weight * y.to(x.dtype) * F.silu(gate.float()))


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [tokens, heads, v_size], state after) of consecutive tokens.

    With u for the updates, S_i = exp(D_i) S + sum over j <= i of exp(D_i - D_j) k_j u_jᵀ, D the sum
    of decays. So the updates solve a triangular system (Yang et al., 2024, section 3.3)."""
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))  # [heads, tokens, size]
    total, beta = decay.T.cumsum(1), beta.T[..., None]
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()
    since = total.exp()[..., None]
    system = (beta * between * (k @ k.mT)).tril(-1)
    wanted = beta * (v - since * (k @ state))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = since * (q @ state) + ((q @ k.mT) * between) @ updates
    left = (total[:, -1:] - total).exp()[..., None]
    state = state * since[:, -1:] + (k * left).mT @ updates
    return out.transpose(0, 1), state


def _recall(x: torch.Tensor, inputs: torch.Tensor, span: Span, before: int) -> torch.Tensor:
    """Return inputs from `before` positions before `span.begin` to the end; zeros before 0."""
    where = torch.arange(span.begin - before, span.start, device=x.device)
    old = inputs[span.read, where % inputs.shape[1]].masked_fill(where[:, None] < 0, 0.0)
    return torch.cat((old.to(x.dtype), x[span.first : span.first + span.num_tokens]))


def _remember(rows: torch.Tensor, inputs: torch.Tensor, span: Span, before: int) -> None:
    """Keep what later steps recall: inputs before the state that is written, and of drafts.

    rows: as `_recall` returns them."""
    kept = [(span.keep, span.kept, span.kept)] if span.keeps else []
    for slot, number, end in ((span.write, span.written, span.end), *kept):
        where = torch.arange(max(0, number - before), end, device=rows.device)
        inputs[slot, where % inputs.shape[1]] = rows[where - (span.begin - before)].to(inputs.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
