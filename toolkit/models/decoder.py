"""A decoder, built from its description, split over pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from toolkit.attention import AttentionBatch
from toolkit.distributed import SINGLE, SINGLE_STAGE, current_group, current_stage, parallel
from toolkit.kernels.table import kernels_for
from toolkit.layers import Embedding, Join, Norm, OutputHead, Stream, VocabularyEmbedding
from toolkit.layers.replay import Replay
from toolkit.models import describe
from toolkit.models.audio_encoder import AudioEncoderModule
from toolkit.models.layer_inputs import LayerInputs
from toolkit.models.mix import AttentionMix, Mix, build_mix, find_module
from toolkit.models.model import CausalLM, Keeper
from toolkit.models.pipeline_split import split_layers
from toolkit.models.rotary import RotaryTables
from toolkit.models.sound_tower import SoundTowerModule
from toolkit.weights.quantization import linear_bytes, quantizes_head, target_device


class Step(nn.Module):
    """Branches that read the same residual stream and are added to it together."""

    def __init__(
        self, step: describe.Step, before: describe.Step | None, hidden: int, rope: RotaryTables
    ) -> None:
        """`before`: the step whose products the stream has not added yet."""
        super().__init__()
        norms = list(dict.fromkeys(branch.norm for branch in step if branch.norm is not None))
        self.join = Join(hidden, [_norm(norm) for norm in norms], *_after(before))
        mixes = [build_mix(branch.mix, hidden, rope) for branch in step]
        self._mixes = tuple(mixes)  # typed, and faster to iterate over
        self.mixes = nn.ModuleList(mixes)
        self.inputs = [norms.index(b.norm) if b.norm is not None else 0 for b in step]
        """Index of each branch's norm."""
        self.into = mixes[0].input if len(step) == 1 else None
        self.is_last_to_keep = False  # of its stage: later steps need only the wanted tokens

    def forward(
        self, stream: Stream, batch: AttentionBatch, wanted: torch.Tensor | None = None
    ) -> None:
        """Add the branches' products to the stream. If `wanted` is given, only of those tokens."""
        rows = stream.read(self.join, self.into)
        for mix, index in zip(self._mixes, self.inputs, strict=True):
            y = mix(rows[index], batch)
            stream.add(mix.output, y if wanted is None else y[wanted])
        if wanted is not None:
            stream.keep(wanted)
            if batch.when_kept is not None:
                batch.when_kept()

    @property
    def keeps(self) -> bool:
        """True if it writes memory, which other tokens read."""
        return any(isinstance(module, Keeper) for module in self.modules())

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for steps that launch the same kernels."""
        norms = ((p.shape, p.dtype) for p in self.join.parameters())
        return (*(mix.kind for mix in self._mixes), *norms)


class Taps:
    """Hidden states that a drafter reads, of all tokens of the model's last step."""

    def __init__(self, layers: Sequence[int], *, output: bool) -> None:
        """`layers`: the residual stream before them; `output`: the last hidden states after it."""
        self.layers, self.output = tuple(layers), output
        self._places: list[int | None] = [*layers, *([None] * output)]
        self._states: torch.Tensor | None = None
        """[num_tokens, hidden of all]. CUDA graphs read and write it at one address."""

    def reserve(self, num_tokens: int, hidden: torch.Tensor) -> None:
        """Make room for steps of so many tokens, whose states are like `hidden` [n, size]."""
        if self._states is None or len(self._states) < num_tokens:
            self._states = hidden.new_zeros(num_tokens, len(self._places) * hidden.shape[1])

    def put(self, layer: int | None, hidden: torch.Tensor) -> None:
        """Keep a copy of the residual stream before a layer, or of the output (None)."""
        self.reserve(len(hidden), hidden)
        assert self._states is not None
        states = self._states[: len(hidden)].view(len(hidden), -1, hidden.shape[1])
        for nth, place in enumerate(self._places):
            if place == layer:
                states[:, nth] = hidden

    def take(self, tokens: torch.Tensor | slice) -> torch.Tensor:
        """Return [n, hidden of all] of some tokens of the step."""
        assert self._states is not None
        return self._states[tokens]


class Decoder(CausalLM):
    """A decoder. Layers are lists of steps."""

    embed: VocabularyEmbedding  # on the first stage; if tied, also on the last
    taps: Taps | None = None
    """Set if a drafter reads hidden states. Steps are not recorded then: those that verify drafts
    never are, since they have several tokens of a request."""

    def __init__(self, description: describe.Decoder, max_model_len: int) -> None:
        vocab, hidden = description.vocab_size, description.hidden_size
        super().__init__(vocab, hidden)
        self.description, self.tied = description, description.is_tied
        self.unused = description.unused
        self.group, self.stage = current_group(), current_stage()
        inputs = description.layer_inputs
        reads_table = self.stage.is_first or inputs is not None
        self.has_table = reads_table or (self.stage.is_last and self.tied)
        self.layer_inputs: LayerInputs | None = None
        if inputs is not None:
            self.layer_inputs = LayerInputs(inputs, len(description.layers), hidden)
        if self.has_table:
            self.embed = VocabularyEmbedding(description.embed, vocab, hidden, is_tied=self.tied)
        positions = description.positions
        if positions is not None and self.stage.is_first:
            self.embed_positions = Embedding(positions.name, positions.size, hidden)
        # Rounded like the weights, as where the models were trained.
        scale = torch.tensor(description.embed_scale, dtype=self.dtype, device="cpu")
        self._embed_scale = scale.item()
        self.rope = RotaryTables(description.ropes, max_model_len, description.axes)
        indices = _stage_layers(description)
        layers = [description.layers[index] for index in indices]
        before = [None, *chain.from_iterable(layers)]
        steps = [
            Step(step, last, hidden, self.rope)
            for step, last in zip(chain.from_iterable(layers), before, strict=False)
        ]
        last = ([step for step in steps if step.keeps] or steps)[-1]
        last.is_last_to_keep = True
        rest = iter(steps)
        self.layers = nn.ModuleList(nn.ModuleList(next(rest) for _ in layer) for layer in layers)
        self._few_layers: list[Sequence[Step]] = []
        self._shares = _share_memory(layers, self._layers(), indices.start)
        self.may_synchronize = any(
            isinstance(one, Mix) and one.may_synchronize for one in self.modules()
        )
        norms = [_norm(description.norm)] if self.stage.is_last else []
        self.last = Join(hidden, norms, *_after(before[-1]))
        self.encoder: AudioEncoderModule | None = _encoder(description.encoder)
        sound = description.sound if self.stage.is_first else None
        self.sound: SoundTowerModule | None = _encoder(sound)
        self._place_rows = kernels_for(target_device()).place_rows
        # What experts compute depends on the numbers of a step.
        self._can_record = (
            self.stage.is_last and self.group.size == 1 and not description.has_experts
        )
        self._replay: Replay | None = None
        if self.stage.is_last:
            head = dataclasses.asdict(description.head)
            tied = self.embed if self.tied else None
            self.lm_head = OutputHead(hidden, vocab, **head, tied=tied)

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = batch.rope_positions
        batch.rope = self.rope.take(batch.positions if positions is None else positions)
        x = self._embed(token_ids, batch) if hidden is None else hidden
        if self.layer_inputs is not None:
            embedded = x if hidden is None else self._embed(token_ids, batch)
            batch.layer_inputs = self.layer_inputs(token_ids, embedded)
        if self.encoder is not None:
            batch.feature = batch.of_feature(self.encoder.num_rows)
        if self.taps is not None:
            return self._run_tapped(x, batch, self.taps)
        if self._replay is None or batch.features is not None:
            return self._run_layers(x, batch)
        return self._replay(self._run_layers, x, batch)

    def pack_weights(self) -> None:
        super().pack_weights()
        self._replay = Replay() if self._can_record else None

    def disable_recording(self) -> None:
        self._replay = None

    @property
    def why_unrecorded(self) -> str | None:
        if self.description.has_experts:
            return "which experts compute depends on the tokens"
        if self.group.size > 1 or not self.stage.is_last:
            return "the model is split over ranks"
        return "--enforce-eager is set" if self._replay is None else self._replay.why_unrecorded

    def _embed(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the first layer's input, [num_tokens, hidden]."""
        x: torch.Tensor = self.embed(token_ids)
        if self._embed_scale != 1.0:
            x = x * self._embed_scale
        self.place_features(x, batch)
        if self.description.positions is not None:
            x = x + self.embed_positions(batch.positions + self.description.positions.first)
        return x

    def place_features(self, x: torch.Tensor, batch: AttentionBatch) -> None:
        """Set the embeddings [num_tokens, hidden] of tokens that stand for features."""
        if (features := batch.features) is not None:
            self._place_rows(x, features.table, features.index, 0, adds=False)

    def _run_layers(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run this stage's layers, and the norm on the last stage."""
        layers = self._layers()
        stream = Stream(x, sum(map(len, layers)) + 1)
        for index, layer in enumerate(layers):
            for step in layer:
                batch = self._run_step(step, stream, batch, drops=self.stage.is_last)
            if batch.features is not None:
                self._add_level(stream, batch, index)
        (out,) = stream.read(self.last)
        assert isinstance(out, torch.Tensor)
        return out

    def _run_step(
        self, step: Step, stream: Stream, batch: AttentionBatch, *, drops: bool
    ) -> AttentionBatch:
        """Run a step. Return the batch of later steps.

        drops: after the last step that writes memory, keep only the wanted tokens."""
        wanted = batch.wanted if drops and step.is_last_to_keep else None
        step(stream, batch, wanted)
        return batch if wanted is None or not self._shares else batch.of_wanted()

    def _add_level(self, stream: Stream, batch: AttentionBatch, index: int) -> None:
        """Add the rows that features have for a layer's output (DeepStack, arXiv:2406.04334)."""
        assert batch.features is not None
        table, column = batch.features.table, self.hidden_size * (index + 1)
        if column < table.shape[1]:
            rows, which = stream.residual, batch.features.index
            self._place_rows(rows, table, which, column, adds=True)

    def _run_tapped(self, x: torch.Tensor, batch: AttentionBatch, taps: Taps) -> torch.Tensor:
        """Run all layers, and keep the hidden states that a drafter reads."""
        layers, wanted = self._layers(), batch.wanted
        stream = Stream(x, sum(map(len, layers)) + 1)
        keeps_all = taps.output or max(taps.layers) >= _last_to_keep(layers)
        for index, layer in enumerate(layers):
            for nth, step in enumerate(layer):
                batch = self._run_step(step, stream, batch, drops=not keeps_all)
                if nth == 0 and index in taps.layers:  # it has read what the layer begins with
                    taps.put(index, stream.residual)
            if batch.features is not None:
                self._add_level(stream, batch, index)
        (out,) = stream.read(self.last)
        assert isinstance(out, torch.Tensor)
        if taps.output:
            taps.put(None, out)
        return out if wanted is None or not keeps_all else out[wanted]

    def _layers(self) -> list[Sequence[Step]]:
        return self._few_layers or list(self.layers)  # type: ignore[arg-type]  # a ModuleList

    @contextmanager
    def with_few_layers(self) -> Iterator[None]:
        """Run only one layer of each kind, and the last with memory, inside the block.

        They launch the kernels of all layers: those after the last with memory have few tokens."""
        layers = self._layers()
        last = _last_to_keep(layers)
        kinds = {
            (index > last, *(step.kind for step in layer)): index
            for index, layer in reversed(list(enumerate(layers)))
        }
        self._few_layers = [layers[index] for index in sorted({last, *kinds.values()})]
        try:
            yield
        finally:
            self._few_layers = []


def _last_to_keep(layers: Sequence[Sequence[Step]]) -> int:
    """Return the index of the last layer with memory."""
    return next(
        index for index, layer in enumerate(layers) if any(one.is_last_to_keep for one in layer)
    )


def _share_memory(
    described: Sequence[describe.Layer], layers: Sequence[Sequence[Step]], first: int
) -> bool:
    """Give layers the memory of those that they read. Return True if there are any.

    first: index of the first layer in the model."""
    found = False
    for branches, steps in zip(described, layers, strict=True):
        mixes = chain.from_iterable(step.mixes for step in steps)
        for branch, mix in zip(chain.from_iterable(branches), mixes, strict=True):
            if (index := branch.mix.reads) is not None:
                assert isinstance(mix, AttentionMix)
                source = chain.from_iterable(step.mixes for step in layers[index - first])
                mix.read(*(one for one in source if isinstance(one, AttentionMix)))
                found = True
    return found


def _encoder(described: describe.FeatureEncoder | None) -> Any:
    """Build an encoder of features, complete on each rank; None if there is none."""
    if described is None:
        return None
    with parallel(SINGLE, SINGLE_STAGE):
        return find_module(described)(described)


def _norm(norm: describe.Norm) -> Norm:
    return Norm(**dataclasses.asdict(norm))


def _after(step: describe.Step | None) -> tuple[Norm | None, float, str | None]:
    """Return how the products of a step are added: (norm, scale, name of the sum's factor)."""
    if step is None:
        return None, 1.0, None
    (first, *others) = step
    assert all((b.post, b.scale, b.factor) == (None, first.scale, None) for b in others)
    return None if first.post is None else _norm(first.post), first.scale, first.factor


def _stage_layers(description: describe.Decoder) -> range:
    """Return the indices of this stage's layers, balanced by the weight bytes that a step reads."""
    stage, num_layers = current_stage(), len(description.layers)
    if stage.count == 1:
        return range(num_layers)
    itemsize = torch.get_default_dtype().itemsize
    # The first layers may have an MLP where the others have experts.
    layer = int(description.layer_size(num_layers - 1) * linear_bytes(itemsize))
    head = description.vocab_size * description.hidden_size
    counts = split_layers(
        num_layers,
        stage.count,
        layer,
        head * (1 if quantizes_head() else itemsize),
        description.num_sharing,
    )
    begin = sum(counts[: stage.index])
    return range(begin, begin + counts[stage.index])
