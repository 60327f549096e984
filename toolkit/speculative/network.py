"""Networks that drafters run, and the simplest: a smaller model with the same tokens."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from toolkit.attention import AttentionBatch
from toolkit.models.model import CausalLM, Model


class Network(Protocol):
    """The model of a drafter."""

    ahead: int
    """0: position p is computed from token p. 1: from token p + 1 and the model's state at p.

    With 1, the last position of a cached block depends on the token after the block, which may be
    that of another request. This costs a little acceptance, and no token is wrong."""
    hidden_size: int  # of the input of `logits`
    feature_size: int  # of what a position passes on to the next draft's; 0: nothing
    dtype: torch.dtype
    reads_features: bool
    """True: it reads the embeddings and the positions that features' tokens have in the model.
    False: it reads their token ids, at their places in the prompt."""

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


class DraftModel:
    """A complete decoder as the network of a drafter (Leviathan et al., 2023)."""

    ahead = 0
    feature_size = 0
    reads_features = False

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        """`vocab_size`: of the model that verifies. Both may have padding."""
        self.model, self._vocab_size = model, vocab_size
        self.hidden_size, self.dtype = model.hidden_size, model.dtype

    def reserve(self, num_tokens: int) -> None:
        """Do nothing: it reads no hidden states."""

    def features(self, tokens: torch.Tensor | slice) -> torch.Tensor | None:
        return None

    def run(
        self, token_ids: torch.Tensor, batch: AttentionBatch, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.model(token_ids.clamp(max=self.model.vocab_size - 1), batch), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _with_vocabulary(self.model.logits(hidden), self._vocab_size)


def _with_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Return logits [n, size]: padding is cut off, or added with logits that exclude it."""
    if logits.shape[1] >= size:
        return logits[:, :size] if logits.is_cuda else logits[:, :size].contiguous()
    return F.pad(logits, (0, size - logits.shape[1]), value=-torch.inf)
