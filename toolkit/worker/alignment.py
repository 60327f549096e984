"""Weights with which the tokens of a transcript attend to its clip, for the times of words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from toolkit.models.cross_attention import CrossAttentionMix
from toolkit.models.decoder import Decoder
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.batch_state import BatchState


class ClipAlignment:
    """Computes prompts that have a transcript already, in chunks, among requests that generate.

    The result of such a prompt are the weights [heads, tokens, frames] of the heads that follow
    words. Keys are those in the pages of the clip."""

    def __init__(
        self, model: Decoder, heads: Sequence[tuple[int, int]], state: BatchState, num_rows: int
    ) -> None:
        """heads: (layer, head) of cross-attention."""
        assert model.encoder is not None, "the model hears"
        self._state, self._group = state, model.group
        self._num_frames, self._num_heads = model.encoder.num_rows, len(heads)
        readers = [one for one in model.modules() if isinstance(one, CrossAttentionMix)]
        self._readers: list[tuple[CrossAttentionMix, list[int], list[int]]] = []
        """Layers, with the heads that this rank has, and their places in the result."""
        for layer, reader in enumerate(readers):
            own = range(reader.heads.begin, reader.heads.begin + reader.heads.count)
            places = [nth for nth, one in enumerate(heads) if one[0] == layer and one[1] in own]
            if places:
                self._readers.append((reader, [heads[n][1] - own.start for n in places], places))
        self._frames = np.zeros(num_rows, np.int64)
        """Frames of the clips of rows that are aligned; 0: the row generates."""
        self._parts: dict[int, list[torch.Tensor]] = {}  # of the chunks so far, by row

    def apply(self, step: SchedulerOutput) -> None:
        """Note which of the new rows are aligned, and whether the step's queries are needed."""
        for new in step.new_rows:
            is_aligned = new.spec.pooling is not None
            self._frames[new.row] = new.spec.features[0].grid[0] if is_aligned else 0
            self._parts.pop(new.row, None)
        needed = self.is_needed(step)
        for reader, _, _ in self._readers:
            reader.keeps_queries = needed

    def is_needed(self, step: SchedulerOutput) -> bool:
        """Return True if a row of the step is aligned."""
        return bool(self._frames[step.rows].any())

    def pool(
        self, step: SchedulerOutput, _hidden: torch.Tensor
    ) -> tuple[list[int], torch.Tensor] | None:
        """Return (indices among the step's samples, flat weights) of prompts that end here.

        None if no prompt ends in this step. Shorter weights are padded to the longest."""
        ends, sample = step.num_tokens.cumsum(), step.samples.cumsum() - 1
        samples, found = [], []
        for index in np.flatnonzero(self._frames[step.rows]).tolist():
            row, end = int(step.rows[index]), int(ends[index])
            parts = self._parts.setdefault(row, [])
            parts.append(self._weights(row, slice(end - int(step.num_tokens[index]), end)))
            if step.samples[index]:
                samples.append(int(sample[index]))
                found.append(torch.cat(self._parts.pop(row), dim=1).flatten())
        if not samples:
            return None
        return samples, torch.nn.utils.rnn.pad_sequence(found, batch_first=True)

    def _weights(self, row: int, tokens: slice) -> torch.Tensor:
        """Return the weights [heads, n, frames] of tokens of the step, in fp32."""
        frames, count = int(self._frames[row]), tokens.stop - tokens.start
        device = self._state.device
        weights = torch.zeros(self._num_heads, count, frames, device=device)
        for reader, heads, places in self._readers:
            own = torch.tensor(heads, device=device)
            queries, keys = reader.queries[tokens][:, own].float(), self._keys(reader, row, own)
            scores = torch.einsum("nhd,fhd->hnf", queries, keys) * reader.attn.shape.scale
            weights[torch.tensor(places, device=device)] = scores.softmax(-1)[:, :, :frames]
        return weights if self._group.size == 1 else self._group.all_reduce(weights)

    def _keys(self, reader: CrossAttentionMix, row: int, heads: torch.Tensor) -> torch.Tensor:
        """Return the keys [num_frames, heads, head_size] of a row's clip, in fp32."""
        cache, attn = reader.attn.k_cache, reader.attn
        count = -(-self._num_frames // cache.shape[1])
        blocks = self._state.tables[attn.group][row, :count].long()
        stored = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        keys = stored[blocks].view(cache.dtype).flatten(0, 1)[: self._num_frames]
        return keys.float()[:, heads]
