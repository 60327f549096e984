"""Numbers of a token for each layer, next to its embedding (Gemma 3n and 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.attention import AttentionBatch
from toolkit.distributed import SINGLE, even_shard, parallel
from toolkit.kernels import cpu
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.table import TritonKernels, kernels_for
from toolkit.layers import Join, Linear, VocabularyEmbedding
from toolkit.layers.norm import Norm
from toolkit.models import describe
from toolkit.models.mix import Mix, rows_of
from toolkit.models.rotary import RotaryTables
from toolkit.weights.activation import activation_kind

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class LayerInputs(nn.Module):
    """Computes the numbers of all layers at once, before the first."""

    def __init__(self, described: describe.LayerInputs, num_layers: int, hidden: int) -> None:
        super().__init__()
        table, norm, self.size = described.table, described.norm, described.size
        width, self._factor = num_layers * self.size, described.scale * described.factor
        self.table = VocabularyEmbedding(table.name, table.size, width)
        self.product = Linear(hidden, width, described.product, bias=False)
        with parallel(SINGLE):  # each rank has all of the product
            post = Norm(norm.name, norm.size, norm.eps)
            self.sum = Join(self.size, [], post, described.scale)

    def forward(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, num_layers · size]. embedded: [num_tokens, hidden]."""
        rows: torch.Tensor = self.table(token_ids) * self._factor
        product: torch.Tensor = self.product(embedded)
        self.sum(product.view(-1, self.size), rows.view(-1, self.size))
        return rows


class LayerInputMix(Mix):
    """A product whose input is gated by the layer's numbers."""

    input: Linear
    output: Linear

    def __init__(self, described: describe.LayerInput, hidden: int, _: RotaryTables) -> None:
        super().__init__()
        size, kind = described.size, activation_kind(described.activation)
        self.input = Linear(hidden, size, described.gate, bias=False, activation=kind, split="out")
        self.output = Linear(size, hidden, described.out, bias=False, split="in")
        own = even_shard(size, "features")
        first = described.layer * size + own.begin
        self._columns = slice(first, first + own.count)

    def forward(self, x: Rows, batch: AttentionBatch) -> torch.Tensor:
        """Return the input of `output`."""
        y: torch.Tensor = self.input(x)
        assert batch.layer_inputs is not None
        inputs = rows_of(batch.layer_inputs, y, batch)[:, self._columns]
        if isinstance(kernels := kernels_for(y.device), TritonKernels):
            kernels.multiply_rows(y, inputs)
        elif not y.is_cuda and cpu.available() and y.dtype in recurrent.DTYPES:
            recurrent.multiply_rows(y, inputs)
        else:
            y *= inputs
        return y
