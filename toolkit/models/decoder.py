"""What decoders have in common: embedding, layers, norm and head in a row, of which each stage of a pipeline has a part."""

from __future__ import annotations

import abc
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch
from toolkit.distributed import current, current_stage
from toolkit.layers import LayerNorm, Linear, MergedLinear, OutputHead, RMSNorm, VocabularyEmbedding
from toolkit.layers.replay import Replay
from toolkit.models.pipeline_split import share_out
from toolkit.models.registry import CausalLM
from toolkit.weights.quantization import quantizes_head
from toolkit.weights.slots import Slots

if TYPE_CHECKING:
    from toolkit.kernels.triton.matmul import Unscaled


class DecoderLayer(nn.Module, abc.ABC):
    """Attention and MLP, each behind a norm."""

    attn_norm: LayerNorm | RMSNorm
    qkv: MergedLinear
    attn: Attention
    out: Linear
    mlp_norm: LayerNorm | RMSNorm
    up: Linear
    """With the activation, and the gate if there is one."""
    down: Linear

    def forward(
        self,
        x: torch.Tensor | Unscaled,
        residual: torch.Tensor,
        batch: AttentionBatch,
        squares: torch.Tensor | None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what `down` takes, residual stream) of the tokens `wanted`, or all; x: through `attn_norm`. The layer ends before
        `down` since the norm behind that one is the next layer's.
        """
        y = self.attn(self.qkv(x), batch)
        if wanted is not None:
            y, residual = y[wanted], residual[wanted]
        x, residual = self.mlp_norm.after(self.out, y, residual, self.up, squares)
        return self.up(x), residual

    def rooms(self, x: torch.Tensor, num_layers: int) -> list[tuple[torch.Tensor | None, ...]]:
        """What the norms behind a layer's attention and behind its MLP take as `squares`, for each of the layers; x: hidden states."""
        if not isinstance(self.mlp_norm, RMSNorm) or not self.out.joins_norms(x):
            return [(None, None)] * num_layers
        # Each begins at a multiple of 16 bytes, as kernels are compiled for.
        rooms = torch.zeros(
            num_layers, 2, len(x) + len(x) % 2, dtype=torch.float64, device=x.device
        )
        return [room.unbind() for room in rooms]

    @abc.abstractmethod
    def slots(self, name: str) -> Slots:
        """The layer's tensors under the checkpoint's name for it."""


class Decoder(CausalLM):
    """A model says how its layers and its norm are made, and what a checkpoint calls them."""

    embed_name: ClassVar[str]
    layers_name: ClassVar[str]
    norm_name: ClassVar[str]

    embed: VocabularyEmbedding
    """On the first stage, and where the head shares its table."""
    norm: LayerNorm | RMSNorm
    """Like the head, on the last stage."""

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.group, self.stage, self.tied = current(), current_stage(), config.tie_word_embeddings
        self.has_table = self.stage.is_first or (self.stage.is_last and self.tied)
        if self.has_table:
            self.embed = VocabularyEmbedding(config.vocab_size, config.hidden_size)
        make = self.layer_maker(config, max_model_len)
        self.indices = _indices(self, config, make)
        """Of the layers that are here."""
        self.layers = nn.ModuleList(make(index) for index in self.indices)
        self._replay = Replay() if self.stage.is_last and self.group.size == 1 else None
        if self.stage.is_last:
            self.norm = self.make_norm(config)
        # On the first stage for its table alone: that is rounded as the weight of the head, wherever the head computes.
        if self.stage.is_last or (self.has_table and self.tied and quantizes_head()):
            self.lm_head = OutputHead(
                config.hidden_size, config.vocab_size, self.embed if self.tied else None
            )

    @abc.abstractmethod
    def layer_maker(self, config: Any, max_model_len: int) -> Callable[[int], DecoderLayer]:
        """What makes a layer, of its index in the model."""

    @abc.abstractmethod
    def make_norm(self, config: Any) -> LayerNorm | RMSNorm:
        """The norm behind the last layer."""

    def embedded(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """What the first layer is given, [num_tokens, hidden]."""
        x: torch.Tensor = self.embed(token_ids)
        return x

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embedded(token_ids, batch) if hidden is None else hidden
        return (
            self._through(x, batch)
            if self._replay is None
            else self._replay(self._through, x, batch)
        )

    def _through(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Layers and norm."""
        layers = self._layers()
        squares = layers[0].rooms(x, len(layers))
        normed, residual = layers[0].attn_norm(x, None)
        for (layer, following), room in zip(pairwise(layers), squares, strict=False):
            x, residual = layer(normed, residual, batch, room[0])
            normed, residual = following.attn_norm.after(
                layer.down, x, residual, following.qkv, room[1]
            )
        layer = layers[-1]
        wanted = batch.wanted if self.stage.is_last else None
        x, residual = layer(normed, residual, batch, squares[-1][0], wanted)
        x = layer.down(x)
        if not self.stage.is_last:
            total: torch.Tensor = self.group.all_reduce(x) + residual
            return total
        out: torch.Tensor = self.norm(x, residual)[0]
        return out

    def _layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]  # a ModuleList says of its items that they are modules

    def slots(self) -> Slots:
        slots: Slots = {}
        if self.has_table:
            slots |= self.embed.slots(self.embed_name)
        for index, layer in zip(self.indices, self._layers(), strict=True):
            slots |= layer.slots(f"{self.layers_name}.{index}")
        if self.stage.is_last:
            slots |= self.norm.slots(self.norm_name)
            if not self.tied:
                slots |= self.lm_head.slots("lm_head")
        return slots


def _indices(model: Decoder, config: Any, make: Callable[[int], DecoderLayer]) -> range:
    """The layers of a model's stage, by the bytes of weights that a step reads."""
    if model.stage.count == 1:
        return range(config.num_hidden_layers)
    with torch.device("meta"):
        parts = make(0), OutputHead(config.hidden_size, config.vocab_size)
    layer = sum(parameter.nbytes for parameter in parts[0].parameters())
    # A head that is to be rounded is so when it is packed.
    head = sum(p.numel() * (1 if quantizes_head() else p.itemsize) for p in parts[1].parameters())
    counts = share_out(config.num_hidden_layers, model.stage.count, layer, head)
    begin = sum(counts[: model.stage.index])
    return range(begin, begin + counts[model.stage.index])
