"""Base classes of decoders: embedding, layers, norm and head, split over pipeline stages."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch
from toolkit.distributed import current_group, current_stage
from toolkit.layers import LayerNorm, Linear, MergedLinear, OutputHead, RMSNorm, VocabularyEmbedding
from toolkit.layers.replay import Replay
from toolkit.models.pipeline_split import split_layers
from toolkit.models.registry import CausalLM
from toolkit.weights.quantization import quantizes_head
from toolkit.weights.slots import Slots

if TYPE_CHECKING:
    from toolkit.kernels.triton.matmul import Unscaled


class DecoderLayer(nn.Module, abc.ABC):
    """Attention and MLP, each preceded by a norm."""

    attn_norm: LayerNorm | RMSNorm
    qkv: MergedLinear
    attn: Attention
    out: Linear
    mlp_norm: LayerNorm | RMSNorm
    up: Linear  # includes the activation, and the gate if there is one
    down: Linear

    def forward(
        self,
        x: torch.Tensor | Unscaled,
        residual: torch.Tensor,
        batch: AttentionBatch,
        square_sums: torch.Tensor | None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (down's input, residual). If `wanted` is given, only for those tokens.

        x: output of `attn_norm`. `down` is left to the caller: the norm after it belongs to the
        next layer, and the two may be fused."""
        y = self.attn(self.qkv(x), batch)
        if wanted is not None:
            y, residual = y[wanted], residual[wanted]
        x, residual = self.mlp_norm.after(self.out, y, residual, self.up, square_sums)
        return self.up(x), residual

    def square_sum_buffers(
        self, x: torch.Tensor, num_layers: int
    ) -> list[tuple[torch.Tensor | None, ...]]:
        """Return buffers per layer for the norms after attention and MLP. x: hidden states."""
        if not isinstance(self.mlp_norm, RMSNorm) or not self.out.can_fuse_norms(x):
            return [(None, None)] * num_layers
        # Kernels are compiled for buffers aligned to 16 bytes: an even number of float64.
        buffers = torch.zeros(
            num_layers, 2, len(x) + len(x) % 2, dtype=torch.float64, device=x.device
        )
        return [pair.unbind() for pair in buffers]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return a value that is equal for layers that launch the same kernels."""
        return self.attn.shape, *((p.shape, p.dtype) for p in self.parameters())

    @abc.abstractmethod
    def slots(self, name: str) -> Slots:
        """Return the slots of the layer whose checkpoint name is `name`."""


class Decoder(CausalLM):
    """Base of decoders. A subclass defines its layers, its norm and their checkpoint names."""

    embed_name: ClassVar[str]
    layers_name: ClassVar[str]
    norm_name: ClassVar[str]

    embed: VocabularyEmbedding  # on the first stage; if tied, also on the last
    norm: LayerNorm | RMSNorm  # on the last stage, like the head

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.group, self.stage, self.tied = (
            current_group(),
            current_stage(),
            config.tie_word_embeddings,
        )
        self.has_table = self.stage.is_first or (self.stage.is_last and self.tied)
        if self.has_table:
            self.embed = VocabularyEmbedding(config.vocab_size, config.hidden_size)
        make = self.layer_factory(config, max_model_len)
        self.indices = _stage_layers(self, config, make)
        self.layers = nn.ModuleList(make(index) for index in self.indices)
        self._few_layers: list[DecoderLayer] = []
        self._replay = Replay() if self.stage.is_last and self.group.size == 1 else None
        if self.stage.is_last:
            self.norm = self.make_norm(config)
        # On the first stage only for its table: a tied table is quantized as the head's weight.
        if self.stage.is_last or (self.has_table and self.tied and quantizes_head()):
            self.lm_head = OutputHead(
                config.hidden_size, config.vocab_size, self.embed if self.tied else None
            )

    @abc.abstractmethod
    def layer_factory(self, config: Any, max_model_len: int) -> Callable[[int], DecoderLayer]:
        """Return a function that makes the layer with a given index."""

    @abc.abstractmethod
    def make_norm(self, config: Any) -> LayerNorm | RMSNorm:
        """Make the norm after the last layer."""

    def embed_input(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the first layer's input, [num_tokens, hidden]."""
        x: torch.Tensor = self.embed(token_ids)
        return x

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed_input(token_ids, batch) if hidden is None else hidden
        return (
            self._run_layers(x, batch)
            if self._replay is None
            else self._replay(self._run_layers, x, batch)
        )

    def _run_layers(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run this stage's layers, and the norm on the last stage."""
        layers = self._layers()
        buffers = layers[0].square_sum_buffers(x, len(layers))
        normed, residual = layers[0].attn_norm(x, None)
        for (layer, following), square_sums in zip(pairwise(layers), buffers, strict=False):
            x, residual = layer(normed, residual, batch, square_sums[0])
            normed, residual = following.attn_norm.after(
                layer.down, x, residual, following.qkv, square_sums[1]
            )
        layer = layers[-1]
        wanted = batch.wanted if self.stage.is_last else None
        x, residual = layer(normed, residual, batch, buffers[-1][0], wanted)
        x = layer.down(x)
        if not self.stage.is_last:
            total: torch.Tensor = self.group.all_reduce(x) + residual
            return total
        out: torch.Tensor = self.norm(x, residual)[0]
        return out

    def _layers(self) -> list[DecoderLayer]:
        return self._few_layers or list(self.layers)  # type: ignore[arg-type]  # a ModuleList

    @contextmanager
    def with_few_layers(self) -> Iterator[None]:
        """Run only one layer of each kind, and the last, inside the block.

        They launch the kernels of all layers."""
        layers = self._layers()
        kinds = {layer.kind: layer for layer in reversed(layers)}
        self._few_layers = list(dict.fromkeys((*kinds.values(), layers[-1])))
        try:
            yield
        finally:
            self._few_layers = []

    def slots(self) -> Slots:
        slots: Slots = {}
        if self.has_table:
            slots |= self.embed.slots(self.embed_name)
        for index, layer in zip(self.indices, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            slots |= layer.slots(f"{self.layers_name}.{index}")
        if self.stage.is_last:
            slots |= self.norm.slots(self.norm_name)
            if not self.tied:
                slots |= self.lm_head.slots("lm_head")
        return slots


def _stage_layers(model: Decoder, config: Any, make: Callable[[int], DecoderLayer]) -> range:
    """Return the indices of this stage's layers, balanced by the weight bytes that a step reads."""
    if model.stage.count == 1:
        return range(config.num_hidden_layers)
    with torch.device("meta"):
        parts = make(0), OutputHead(config.hidden_size, config.vocab_size)
    layer = sum(parameter.nbytes for parameter in parts[0].parameters())
    # The head is not quantized yet: this happens when it is packed.
    head = sum(p.numel() * (1 if quantizes_head() else p.itemsize) for p in parts[1].parameters())
    counts = split_layers(config.num_hidden_layers, model.stage.count, layer, head)
    begin = sum(counts[: model.stage.index])
    return range(begin, begin + counts[model.stage.index])
