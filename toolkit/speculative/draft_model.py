"""A smaller model with the same tokens as drafter (Leviathan et al., 2023)."""

from __future__ import annotations

import torch

from toolkit.attention import AttentionBatch
from toolkit.models.model import CausalLM
from toolkit.speculative.model_drafter import with_vocabulary


class DraftModel:
    """A complete decoder as the network of a drafter."""

    ahead = 0
    keeps_drafts = True
    feature_size = 0

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
        return with_vocabulary(self.model.logits(hidden), self._vocab_size)
