"""BERT (Devlin et al., 2019): text encoder and cross-encoder."""

from typing import Any, ClassVar

import torch
from torch import nn

from toolkit.attention.packed import PackedBatch, attend
from toolkit.distributed import full_shard
from toolkit.errors import CheckpointError
from toolkit.layers import Embedding, Join, Linear, MergedLinear, Norm
from toolkit.models import describe
from toolkit.models.model import Encoder, Scorer
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slots, plain_slots
from toolkit.weights.source import Source


class BertLayer(nn.Module):
    """Attention and MLP, each followed by a layer norm."""

    def __init__(self, config: Any, name: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        parts = [Source(f"{name}.attention.self.{part}") for part in ("query", "key", "value")]
        self.qkv = MergedLinear(hidden, [full_shard(hidden)] * 3, parts, bias=True)
        self.attn_out = Linear(hidden, hidden, Source(f"{name}.attention.output.dense"), bias=True)
        self.attn_norm = layer_norm(config, f"{name}.attention.output.LayerNorm")
        up, down = Source(f"{name}.intermediate.dense"), Source(f"{name}.output.dense")
        kind = activation_kind(config.hidden_act)
        self.up = Linear(hidden, inner, up, bias=True, activation=kind)
        self.down = Linear(inner, hidden, down, bias=True)
        self.mlp_norm = layer_norm(config, f"{name}.output.LayerNorm")

    def forward(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        attended = self.attn_out(attend(query, key, value, batch.prompts).flatten(1))
        (x,), _ = self.attn_norm(attended, x)
        (x,), _ = self.mlp_norm(self.down(self.up(x)), x)
        return x


def layer_norm(config: Any, name: str) -> Join:
    """Return the sum of two rows and its layer norm."""
    norm = Norm(name, config.hidden_size, config.layer_norm_eps, is_centered=True, has_bias=True)
    return Join(config.hidden_size, [norm])


class Bert(Encoder):
    prefix: ClassVar[str] = "bert"  # of tensor names
    unused: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")

    def __init__(self, config: Any, description: describe.Encoder) -> None:
        hidden, name = config.hidden_size, f"{self.prefix}.embeddings"
        super().__init__(config.vocab_size, hidden)
        if config.is_decoder or config.position_embedding_type != "absolute":
            raise CheckpointError(
                f"Unsupported {config.architectures[0]}: is_decoder is {config.is_decoder}, "
                f"position_embedding_type is {config.position_embedding_type}. tk runs encoders "
                f"with absolute positions."
            )
        num_positions = config.max_position_embeddings
        self.first_position = num_positions - description.max_positions
        """Row of the position table for a text's first token."""
        self.words = Embedding(f"{name}.word_embeddings", config.vocab_size, hidden)
        self.positions = Embedding(f"{name}.position_embeddings", num_positions, hidden)
        self.types = Embedding(f"{name}.token_type_embeddings", config.type_vocab_size, hidden)
        self.norm = layer_norm(config, f"{name}.LayerNorm")
        self.layers = nn.ModuleList(
            BertLayer(config, f"{self.prefix}.encoder.layer.{i}")
            for i in range(config.num_hidden_layers)
        )

    def forward(self, token_ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        # RoBERTa has one type for both texts of a pair.
        types = batch.token_types.clamp(max=self.types.size - 1)
        positions = self.positions(batch.positions + self.first_position) + self.types(types)
        (x,), _ = self.norm(self.words(token_ids), positions)
        for layer in self.layers:
            x = layer(x, batch)
        hidden: torch.Tensor = x
        return hidden


class BertScorer(Bert, Scorer):
    """Classifier of texts. With one label, it scores a pair of texts (Nogueira & Cho, 2019)."""

    head: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")  # names of its layers

    def __init__(self, config: Any, description: describe.Encoder) -> None:
        super().__init__(config, description)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.label = nn.Linear(config.hidden_size, config.num_labels)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.label(torch.tanh(self.dense(hidden)))
        return scores

    def slots(self) -> Slots:
        dense, label = self.head
        return super().slots() | plain_slots(self.dense, dense) | plain_slots(self.label, label)
