"""Definitions of the kernels of layers with a state for each request, in plain PyTorch.

A step's tokens are packed, request after request. A request's state is read in one slot and written
in another, or the same; all are read before any is written."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens of a prompt that are computed together
EPS = 1e-6  # of the norm of queries and keys


class Sequences(NamedTuple):
    """Tokens and states of a step's requests."""

    starts: list[int] | None  # first token of each, and the end; None: each has one token
    reads: torch.Tensor  # [num_reqs] int, slot of the state before
    writes: torch.Tensor  # [num_reqs] int, slot of the state after
    is_first: torch.Tensor  # [num_reqs] bool: the state before is zeros, whatever the slot has
    keeps: torch.Tensor  # [num_reqs] int, slot of a snapshot; negative: none
    after: list[int]  # number of each request's tokens in its snapshot, if each has several


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    sequences: Sequences,
    bias: torch.Tensor | None = None,
    *,
    has_silu: bool = True,
) -> torch.Tensor:
    """Return the causal convolution of each channel, and silu of it, [num_tokens, channels].

    weight: [channels, width]; windows: [num_slots, width - 1, channels], the inputs before."""
    before = _before(windows, sequences).to(x.dtype)
    width = weight.shape[1]
    kernel = weight.float().T  # [width, channels]
    if sequences.starts is None:
        inputs = torch.cat((before, x[:, None]), 1)
        _write(windows, inputs[:, 1:], sequences)
        return _activated((inputs.float() * kernel).sum(1), bias, has_silu).to(x.dtype)
    out = torch.empty_like(x)
    for index, (first, end) in enumerate(_spans(sequences.starts)):
        inputs = torch.cat((before[index], x[first:end]))
        windows[sequences.writes[index]] = inputs[end - first :].to(windows.dtype)
        if (after := sequences.after[index]) > 0:
            kept = inputs[after : after + width - 1]
            windows[sequences.keeps[index]] = kept.to(windows.dtype)
        parts = inputs.float().unfold(0, width, 1)  # [tokens, channels, width]
        out[first:end] = _activated((parts * kernel.T).sum(2), bias, has_silu).to(x.dtype)
    return out


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Return the outputs [num_tokens, v_heads, v_size] of a gated delta net (arXiv:2412.06464).

    S = exp(decay) · S; S = S + k (beta · (v - Sᵀ k))ᵀ; the output is Sᵀ q / sqrt(k_size), with
    queries and keys of length 1. Consecutive heads of values share one of queries and keys.
    q, k: [num_tokens, k_heads, k_size]; decay, beta: [num_tokens, v_heads] fp32;
    states: [num_slots, v_heads, k_size, v_size]. Computed in fp32."""
    state = _before(states, sequences).float()
    dtype, group = v.dtype, v.shape[1] // k.shape[1]
    q, k = (_unit(one).repeat_interleave(group, 1) for one in (q, k))
    q, v = q * q.shape[-1] ** -0.5, v.float()
    if sequences.starts is None:
        state = state * decay.exp()[..., None, None]
        update = (v - _read(state, k)) * beta[..., None]
        state = state + k[..., None] * update[..., None, :]
        _write(states, state, sequences)
        return _read(state, q).to(dtype)
    out = torch.empty_like(v)
    for index, (first, end) in enumerate(_spans(sequences.starts)):
        own, after = state[index], sequences.after[index]
        for at, stop in _chunks(first, end, after):
            part = slice(at, stop)
            out[part], own = _chunk(q[part], k[part], v[part], decay[part], beta[part], own)
            if stop - first == after:
                states[sequences.keeps[index]] = own.to(states.dtype)
        states[sequences.writes[index]] = own.to(states.dtype)
    return out.to(dtype)


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


def _before(states: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return the states before the step, [num_reqs, ...]. A slot of no request may have NaN."""
    is_first = sequences.is_first.view(-1, *[1] * (states.dim() - 1))
    return states[sequences.reads].masked_fill(is_first, 0.0)


def _write(states: torch.Tensor, after: torch.Tensor, sequences: Sequences) -> None:
    """Write the states after the step of requests with one token each, and snapshots."""
    after = after.to(states.dtype)
    states[sequences.writes] = after
    which = (sequences.keeps >= 0).nonzero()[:, 0]
    states[sequences.keeps[which]] = after[which]


def _chunks(first: int, end: int, after: int) -> list[tuple[int, int]]:
    """Return parts of a request's tokens, one of which ends where its snapshot does."""
    middle = first + max(after, 0)
    starts = [*range(first, middle, CHUNK), *range(middle, end, CHUNK)]
    return list(pairwise([*starts, end]))


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return Sᵀ k of each head, [..., v_size]."""
    return (state * key[..., None]).sum(-2)


def _activated(y: torch.Tensor, bias: torch.Tensor | None, has_silu: bool) -> torch.Tensor:
    y = y if bias is None else y + bias
    return F.silu(y) if has_silu else y


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _spans(starts: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(starts))
