"""BERT (Devlin et al., 2019): text encoder and cross-encoder."""

from typing import Any, ClassVar

import torch
from torch import nn

from toolkit.attention.packed import PackedBatch, attend
from toolkit.distributed import full_shard
from toolkit.errors import CheckpointError
from toolkit.layers import Embedding, LayerNorm, Linear, MergedLinear
from toolkit.models.registry import Encoder, Scorer
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slots, plain_slots


class BertLayer(nn.Module):
    """Attention and MLP, each followed by a layer norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.num_heads = config.num_attention_heads
        self.qkv = MergedLinear(hidden, [full_shard(hidden)] * 3, bias=True)
        self.attn_out = Linear(hidden, hidden, bias=True)
        self.attn_norm = LayerNorm(hidden, eps)
        kind = activation_kind(config.hidden_act)
        self.up = Linear(hidden, config.intermediate_size, bias=True, activation=kind)
        self.down = Linear(config.intermediate_size, hidden, bias=True)
        self.mlp_norm = LayerNorm(hidden, eps)

    def forward(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        x, _ = self.attn_norm(self.attn_out(attend(self.qkv(x), batch, self.num_heads)), x)
        x, _ = self.mlp_norm(self.down(self.up(x)), x)
        return x

    def slots(self, name: str) -> Slots:
        return (
            self.qkv.merged_slots(
                [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
            )
            | self.attn_out.slots(f"{name}.attention.output.dense")
            | self.attn_norm.slots(f"{name}.attention.output.LayerNorm")
            | self.up.slots(f"{name}.intermediate.dense")
            | self.down.slots(f"{name}.output.dense")
            | self.mlp_norm.slots(f"{name}.output.LayerNorm")
        )


class Bert(Encoder):
    prefix: ClassVar[str] = "bert"  # of tensor names
    unused: ClassVar[tuple[str, ...]] = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        if config.is_decoder or config.position_embedding_type != "absolute":
            raise CheckpointError(
                f"Unsupported {config.architectures[0]}: is_decoder is {config.is_decoder}, "
                f"position_embedding_type is {config.position_embedding_type}. tk runs encoders "
                f"with absolute positions."
            )
        hidden = config.hidden_size
        self.first_position = config.max_position_embeddings - self.max_positions(config)
        """Row of the position table for a text's first token."""
        self.words = Embedding(config.vocab_size, hidden)
        self.positions = Embedding(config.max_position_embeddings, hidden)
        self.types = Embedding(config.type_vocab_size, hidden)
        self.norm = LayerNorm(hidden, config.layer_norm_eps)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    @staticmethod
    def max_positions(config: Any) -> int:
        return int(config.max_position_embeddings)

    def forward(self, token_ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        # RoBERTa has one type for both texts of a pair.
        types = batch.token_types.clamp(max=self.types.size - 1)
        positions = self.positions(batch.positions + self.first_position) + self.types(types)
        x, _ = self.norm(self.words(token_ids), positions)
        for layer in self.layers:
            x = layer(x, batch)
        hidden: torch.Tensor = x
        return hidden

    def slots(self) -> Slots:
        name = f"{self.prefix}.embeddings"
        slots = self.words.slots(f"{name}.word_embeddings")
        slots |= self.positions.slots(f"{name}.position_embeddings")
        slots |= self.types.slots(f"{name}.token_type_embeddings")
        slots |= self.norm.slots(f"{name}.LayerNorm")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, BertLayer)
            slots |= layer.slots(f"{self.prefix}.encoder.layer.{i}")
        return slots


class BertScorer(Bert, Scorer):
    """Classifier with one label: scores a pair of texts (Nogueira & Cho, 2019)."""

    head: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")  # names of its layers

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        require_one_label(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.label = nn.Linear(config.hidden_size, 1)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.label(torch.tanh(self.dense(hidden)))
        return scores

    def slots(self) -> Slots:
        dense, label = self.head
        return super().slots() | plain_slots(self.dense, dense) | plain_slots(self.label, label)


def require_one_label(config: Any) -> None:
    """Raise CheckpointError for a classifier with several labels."""
    if config.num_labels != 1:
        raise CheckpointError(
            f"This {config.architectures[0]} has {config.num_labels} labels. tk serves only "
            f"classifiers with one label, which score pairs of texts."
        )
