"""Networks of drafters that read hidden states. `models.eagle` describes them."""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch
from torch import nn

from toolkit.attention import AttentionBatch
from toolkit.errors import CheckpointError
from toolkit.layers import Join, Linear, Norm, OutputHead, Stream, VocabularyEmbedding
from toolkit.models import describe
from toolkit.models.decoder import Decoder, Step, Taps
from toolkit.models.eagle import Eagle, Eagle3, OwnLayer
from toolkit.models.mix import AttentionMix
from toolkit.models.model import Model, default_dtype
from toolkit.models.rotary import RotaryTables
from toolkit.weights.formats import Packings
from toolkit.weights.quantization import quantized
from toolkit.weights.slots import UNREAD, Slot, Slots
from toolkit.weights.source import Source


class EagleModel(Model):
    """EAGLE: layers over fc of a token's embedding and the model's hidden state before it."""

    architecture = "EAGLE"
    num_states = 1  # hidden states of the model that it reads at a position
    embed: VocabularyEmbedding  # if it has one
    has_embedding = False

    def __init__(self, description: Eagle, target_size: int, max_model_len: int) -> None:
        """`target_size`: the model's hidden size."""
        hidden = description.hidden_size
        super().__init__(description.vocab_size, hidden)
        axes = description.axes if isinstance(description, OwnLayer) else ()
        self.rope = RotaryTables(description.ropes, max_model_len, axes)
        source = description.own.product if isinstance(description, OwnLayer) else Source("fc")
        self.fc = Linear(self._fc_size(target_size), hidden, source, bias=description.has_bias)
        self._make_layers(description)

    def _fc_size(self, target_size: int) -> int:
        return self.hidden_size + target_size

    def _make_layers(self, description: Eagle) -> None:
        steps = list(chain.from_iterable(description.layers))
        self.steps = nn.ModuleList(
            Step(step, before, self.hidden_size, self.rope)
            for step, before in zip(steps, [None, *steps], strict=False)
        )
        self.last = Join(self.hidden_size, [])

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features of positions, given the model's hidden states."""
        return states

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input of the output head, features of the next position).

        Of `batch.wanted` tokens, or of all. embeddings, features: [num_tokens, hidden]."""
        positions = batch.rope_positions
        batch.rope = self.rope.take(batch.positions if positions is None else positions)
        stream = self._begin(embeddings, features, batch)
        (out,) = stream.read(self.last)
        assert isinstance(out, torch.Tensor)
        return out, stream.residual

    def _begin(
        self, embeddings: torch.Tensor, features: torch.Tensor, batch: AttentionBatch
    ) -> Stream:
        inputs = self._inputs(embeddings, features)
        stream = Stream(self.fc(torch.cat(inputs, dim=1)), len(self.steps) + 1)
        last_attention = len(self.steps) - 2
        for index, step in enumerate(self.steps):
            step(stream, batch, batch.wanted if index == last_attention else None)
        return stream

    def _inputs(
        self, embeddings: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `fc` reads."""
        return embeddings, features

    def slots(self) -> Slots:
        # A copy of the model's.
        return super().slots() | {"embed_tokens.weight": UNREAD}


class OwnLayerModel(EagleModel):
    """A layer of the model's own checkpoint over fc of two norms."""

    architecture = "MTP"

    def __init__(self, description: Eagle, target_size: int, max_model_len: int) -> None:
        assert isinstance(description, OwnLayer)
        super().__init__(description, target_size, max_model_len)
        self._own, self.unused = description.own, description.others
        if self._own.embed is not None:
            self.has_embedding = True
            self.embed = VocabularyEmbedding(
                self._own.embed, description.vocab_size, self.hidden_size
            )

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, residual = super().forward(embeddings, features, batch)
        return out, out if self._own.passes_norm else residual

    def _make_layers(self, description: Eagle) -> None:
        assert isinstance(description, OwnLayer)
        super()._make_layers(description)
        own, hidden = description.own, self.hidden_size
        self.embed_norm, self.hidden_norm, self.last = (
            Join(hidden, [_norm(norm)]) for norm in (own.embed_norm, own.hidden_norm, own.norm)
        )

    def _inputs(
        self, embeddings: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ((embedding,), _), ((hidden,), _) = (
            self.embed_norm(embeddings, None),
            self.hidden_norm(features, None),
        )
        return embedding, hidden

    def slots(self) -> Slots:
        unread = {f"{self._own.name}.{name}": UNREAD for name in self._own.unread}
        return Model.slots(self) | unread


class Eagle3Model(EagleModel):
    """EAGLE-3: fc is of the model's hidden states alone, and the layer reads both norms."""

    architecture = "EAGLE-3"

    def __init__(self, description: Eagle, target_size: int, max_model_len: int) -> None:
        assert isinstance(description, Eagle3)
        self.num_states = len(description.taps)
        super().__init__(description, target_size, max_model_len)
        vocab, hidden = description.vocab_size, self.hidden_size
        self.has_embedding = description.has_embedding
        if self.has_embedding:
            self.embed = VocabularyEmbedding("embed_tokens", vocab, hidden)
        self.lm_head = OutputHead(hidden, description.draft_vocab_size)
        self.to_target = nn.Parameter(
            torch.zeros(description.draft_vocab_size, dtype=torch.int64), requires_grad=False
        )
        """The model's token minus the drafter's, by the drafter's token (`d2t`)."""
        self._has_map, self._residual_is_norm = description.has_map, description.residual_is_norm

    def _fc_size(self, target_size: int) -> int:
        return self.num_states * target_size

    def _make_layers(self, description: Eagle) -> None:
        assert isinstance(description, Eagle3)
        hidden, ((first, second),) = self.hidden_size, description.layers
        (branch,) = first
        assert isinstance(branch.mix, describe.Attention)
        self.embed_norm = Join(hidden, [_norm(description.embed_norm)])
        self.hidden_norm = Join(hidden, [_norm(description.hidden_norm)])
        self.mix = AttentionMix(branch.mix, hidden, self.rope, num_inputs=2)
        self.mlp = Step(second, first, hidden, self.rope)
        self.last = Join(hidden, [_norm(description.norm)])

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.fc(states)
        return features

    def _begin(
        self, embeddings: torch.Tensor, features: torch.Tensor, batch: AttentionBatch
    ) -> Stream:
        ((embedding,), _), ((hidden,), _) = (
            self.embed_norm(embeddings, None),
            self.hidden_norm(features, None),
        )
        y = self.mix(torch.cat((embedding, hidden), dim=1), batch)
        stream = Stream(hidden if self._residual_is_norm else features, 2)
        if batch.wanted is not None:
            y = y[batch.wanted]
            stream.keep(batch.wanted)
        stream.add(self.mix.output, y)
        self.mlp(stream, batch)
        return stream

    def slots(self) -> Slots:
        to_target = {"d2t": Slot(self.to_target)} if self._has_map else {}
        own: Slots = {"t2d": UNREAD, **to_target}
        return Model.slots(self) | own


class EagleNetwork:
    """An EAGLE model as the network of a drafter."""

    ahead = 1

    def __init__(self, model: EagleModel, target: Decoder, taps: Taps) -> None:
        """Both have their weights."""
        self.model, self._target, self._taps = model, target, taps
        target.taps = taps
        self.hidden_size = self.feature_size = model.hidden_size
        self.dtype, self._device = model.dtype, next(model.parameters()).device
        self.reads_features = isinstance(model, OwnLayerModel)
        self._embed = model.embed if model.has_embedding else target.embed
        self._tokens: torch.Tensor | None = None
        """The model's tokens, by the drafter's."""
        if isinstance(model, Eagle3Model):
            to_target = model.to_target
            self._tokens = torch.arange(len(to_target), device=to_target.device) + to_target
            least, most = int(self._tokens.min()), int(self._tokens.max())
            if least < 0 or most >= target.vocab_size:
                raise CheckpointError(
                    f"The drafter's d2t names token {least if least < 0 else most}, and the model "
                    f"has {target.vocab_size}. Use a drafter that was trained for this model."
                )

    def reserve(self, num_tokens: int) -> None:
        like = torch.empty(0, self._target.hidden_size, dtype=self.dtype, device=self._device)
        self._taps.reserve(num_tokens, like)

    def features(self, tokens: torch.Tensor | slice) -> torch.Tensor | None:
        return self.model.combine(self._taps.take(tokens))

    def run(
        self, token_ids: torch.Tensor, batch: AttentionBatch, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        embeddings = self._embed(token_ids)
        self._target.place_features(embeddings, batch)
        hidden, features = self.model(embeddings, features, batch)
        return hidden, features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._tokens is None:
            return self._target.logits(hidden)
        assert isinstance(self.model, Eagle3Model)
        logits: torch.Tensor = self.model.lm_head(hidden)
        everything = logits.new_full((len(hidden), self._target.vocab_size), -torch.inf)
        return everything.index_copy_(1, self._tokens, logits)


def build_eagle(
    description: Eagle,
    target_size: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    quantization: str | None,
    packings: Packings | None,
    target: torch.device,
) -> EagleModel:
    """Build a network with uninitialized parameters. See `models.build.build_model`."""
    kinds: dict[type[Eagle], type[EagleModel]]
    kinds = {Eagle: EagleModel, Eagle3: Eagle3Model, OwnLayer: OwnLayerModel}
    formats = quantized(quantization, packings, target)
    with device, default_dtype(dtype), formats, torch.inference_mode():
        model = kinds[type(description)](description, target_size, max_model_len)
    model.eval()
    return model


def taps_of(description: Eagle) -> Taps:
    """Return the taps of the model that a drafter needs."""
    if isinstance(description, Eagle3):
        return Taps(description.taps, output=False)
    return Taps((), output=True)


def _norm(norm: describe.Norm) -> Norm:
    return Norm(**dataclasses.asdict(norm))
