"""Experts next to an MLP, each between norms of its own (Gemma 4)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from toolkit.attention import AttentionBatch
from toolkit.distributed import SINGLE, current_group, parallel
from toolkit.layers import Join
from toolkit.layers.norm import Norm
from toolkit.models import describe
from toolkit.models.mix import ExpertsMix, Mix, MLPMix
from toolkit.models.rotary import RotaryTables

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class ExpertsAndMLPMix(Mix):
    """The sum of both. Their norms are of complete rows, so that the ranks' parts are summed."""

    def __init__(self, described: describe.ExpertsAndMLP, hidden: int, _: RotaryTables) -> None:
        super().__init__()
        self.mlp, self.experts = (
            MLPMix(described.mlp, hidden),
            ExpertsMix(described.experts, hidden),
        )
        self._group = current_group()
        (mlp, mlp_post), (experts, experts_post) = described.mlp_norms, described.experts_norms
        with parallel(SINGLE):
            self.norms = Join(hidden, [_norm(mlp), _norm(experts)])
            self.router_norm = Join(hidden, [_norm(described.router_norm)])
            self.mlp_post = Join(hidden, [_norm(mlp_post)])
            self.sum = Join(hidden, [], _norm(experts_post))

    def forward(self, x: Rows, batch: AttentionBatch) -> torch.Tensor:
        """Return the sum [num_tokens, hidden]: on the first rank, zeros on others."""
        assert isinstance(x, torch.Tensor), "without `input`, rows are complete"
        (dense, sparse), _ = self.norms(x, None)
        (routed,), _ = self.router_norm(x, None)
        y = self.mlp.output(self.mlp(dense, batch))
        z = self.experts.sum(sparse, routed, batch)
        if self._group.size > 1:
            y, z = self._group.all_reduce(torch.stack((y, z))).unbind()
        (y,), _ = self.mlp_post(y, None)
        self.sum(z, y)
        return y if self._group.rank == 0 else torch.zeros_like(y)


def _norm(norm: describe.Norm) -> Norm:
    return Norm(**asdict(norm))
