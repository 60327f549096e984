"""Drafts from a model that runs after each step, with keys and values of its own."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from toolkit.attention import AttentionBatch
from toolkit.models.model import Model
from toolkit.sampling.sampler import sample
from toolkit.sampling.sampling_state import SamplingState
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.speculative.drafter import NO_DRAFT, Drafts

MAX_LAG = 64  # positions
Rows = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int32]


class RowState(Protocol):
    """The rows' tokens and blocks (`worker.batch_state.BatchState`)."""

    device: torch.device
    token_ids: torch.Tensor  # [num_rows, max_len + 1]
    lengths: npt.NDArray[np.int32]  # [num_rows]
    capacity: npt.NDArray[np.int32]  # [num_rows], tokens that a row's blocks hold
    sampling: SamplingState

    def batch(
        self, rows: Rows, num_tokens: Counts, context_lens: Counts, ahead: int = 0
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """Return token ids and attention batch of the last tokens of the rows' contexts."""

    def put(self, rows: Rows, positions: Counts, tokens: torch.Tensor) -> None:
        """Write tokens."""


class Network(Protocol):
    """The model of a drafter."""

    ahead: int
    """0: position p is computed from token p. 1: from token p + 1 and the model's state at p.

    With 1, the last position of a cached block depends on the token after the block, which may be
    that of another request. This costs a little acceptance, and no token is wrong."""
    keeps_drafts: bool
    """True if what it computed for a draft stays valid once the draft is accepted."""
    hidden_size: int  # of the input of `logits`
    feature_size: int  # of what a position passes on to the next draft's; 0: nothing
    dtype: torch.dtype

    @property
    def model(self) -> Model:
        """The model, with its layers."""

    def reserve(self, num_tokens: int) -> None:
        """Make room, at one address, for what it reads of steps of up to so many tokens."""

    def features(self, tokens: torch.Tensor | slice) -> torch.Tensor | None:
        """Return what it reads of the model's last step, for some tokens of that step."""

    def run(
        self, token_ids: torch.Tensor, batch: AttentionBatch, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute positions. Return (input of `logits`, features of the next position).

        Of `batch.wanted` tokens, or of all."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, tokens that the model has]."""


class ModelDrafter:
    """Runs a network over the tokens of each step, then over its own drafts.

    It uses the model's block table and block numbers, so cached blocks of a prefix hold its keys
    and values, too. Positions past a row's own blocks lie in spare blocks, and are computed again
    once the row has a block for them. It samples as the model does: with the same settings and the
    same noise, since a draft is right only if it is the token that the model samples."""

    def __init__(self, network: Network, state: RowState, most: int, limit: int) -> None:
        """`most`: drafts of a row; `limit`: positions that the network can compute."""
        self._network, self._state, self._most, self._limit = network, state, most, limit
        num_rows = len(state.lengths)
        self._may_lag = not network.feature_size and not network.ahead
        self._reach = np.zeros(num_rows, np.int32)
        """Number of positions of each row that are computed if all of its drafts are right."""
        self._hidden = torch.zeros(
            num_rows, network.hidden_size, dtype=network.dtype, device=state.device
        )
        """Output of the network at each row's last position."""
        self._features = torch.zeros(
            num_rows, network.feature_size, dtype=network.dtype, device=state.device
        )

    def place(self, new: NewRow) -> None:
        self._reach[new.row] = new.num_computed_tokens

    def observe(self, step: SchedulerOutput) -> None:
        """Compute the positions of the step's tokens that are not computed yet.

        While no drafts are wanted, up to MAX_LAG of them wait, if the network reads tokens alone:
        they take little longer than one."""
        network, state, rows = self._network, self._state, step.rows
        ends = np.where(
            step.samples, state.lengths[rows] - network.ahead, step.num_computed + step.num_tokens
        ).astype(np.int32)
        firsts = step.num_tokens.cumsum() - step.num_tokens
        samples = step.samples
        if (fits := ends <= self._limit).sum() < len(rows):
            rows, ends, firsts, samples = rows[fits], ends[fits], firsts[fits], samples[fits]
        if not len(rows):
            return
        counts = ends - np.minimum(self._reach[rows], ends - 1)
        if not step.drafts and self._may_lag and counts.max() < MAX_LAG:
            return
        token_ids, batch = state.batch(rows, counts, ends, network.ahead)
        last = counts.cumsum() - 1
        nth = np.arange(len(token_ids)) - np.repeat(last + 1 - counts, counts)
        features = network.features(torch.from_numpy(np.repeat(firsts, counts) + nth))
        wanted = last[samples]
        if len(wanted) < len(token_ids):
            batch.wanted = torch.from_numpy(wanted).to(state.device, torch.int64)
        hidden, features = network.run(token_ids, batch, features)
        there = torch.from_numpy(rows[samples]).to(state.device, torch.int64)
        self._hidden[there] = hidden
        if features is not None:
            self._features[there] = features
        self._reach[rows] = np.minimum(ends, state.capacity[rows])

    def propose(self, rows: Rows) -> Drafts:
        network, state = self._network, self._state
        drafts = np.full((len(rows), self._most), NO_DRAFT, np.int32)
        lengths = state.lengths[rows]
        which = np.flatnonzero(lengths < self._limit)
        there = torch.from_numpy(rows[which]).to(state.device, torch.int64)
        hidden = self._hidden[there]
        features: torch.Tensor | None = self._features[there]
        for nth in range(self._most):
            if nth:
                stays = lengths[which] + nth < self._limit
                stays &= drafts[which, nth - 1] >= 0
                which, some = which[stays], torch.from_numpy(np.flatnonzero(stays))
                if not len(which):
                    break
                if features is not None and len(some) < len(features):
                    features = features[some.to(state.device)]
                ends = lengths[which] - network.ahead + nth
                counts = np.ones_like(ends)
                token_ids, batch = state.batch(rows[which], counts, ends, network.ahead)
                hidden, features = network.run(token_ids, batch, features)
            elif not len(which):
                break
            own, positions = rows[which], lengths[which] + nth
            logits = network.logits(hidden).float()
            tokens = sample(logits, state.sampling, state.token_ids, own, positions)
            state.put(own, positions, tokens)
            drafts[which, nth] = tokens.cpu().numpy()
        if network.keeps_drafts:
            own, ends = rows[which], lengths[which] + self._most - 1
            self._reach[own] = np.maximum(self._reach[own], np.minimum(ends, state.capacity[own]))
        return drafts


def with_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Return logits [n, size]: padding is cut off, or added with logits that exclude it."""
    if logits.shape[1] >= size:
        return logits[:, :size] if logits.is_cuda else logits[:, :size].contiguous()
    return F.pad(logits, (0, size - logits.shape[1]), value=-torch.inf)
