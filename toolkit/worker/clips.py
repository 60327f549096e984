"""Clips of requests: an encoder computes their keys and values into pages of the cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch
from toolkit.hardware.graph_capture import capture
from toolkit.hardware.memory import to_device
from toolkit.models.audio_encoder import AudioEncoderModule
from toolkit.models.cross_attention import CrossAttentionMix
from toolkit.models.decoder import Decoder
from toolkit.scheduler import SchedulerOutput
from toolkit.scheduler.output import Encode
from toolkit.speech.clip import Clip

MOST_CLIPS = 4  # that are encoded at once
"""With so many of 30 s, an H200's products are as fast as with more."""
CAPTURED = (1, 2, 4)


class Clips:
    """Encodes the clips that a step loads, before its tokens read them."""

    def __init__(self, model: Decoder, blocks_per_page: int, block_size: int) -> None:
        assert model.encoder is not None, "the model hears"
        self.encoder: AudioEncoderModule = model.encoder
        self._readers = [one for one in model.modules() if isinstance(one, CrossAttentionMix)]
        self._device = self.encoder.mel.window.device
        self._blocks_per_page, self._block_size = blocks_per_page, block_size
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        """(Graph, samples, rows) by number of clips."""

    def apply(self, step: SchedulerOutput) -> None:
        """Encode the clips of a step."""
        loads = [load for load in step.loads if isinstance(load, Encode)]
        for first in range(0, len(loads), MOST_CLIPS):
            some = loads[first : first + MOST_CLIPS]
            samples = np.zeros((len(some), self.encoder.encoder.num_samples), np.float32)
            for row, load in zip(samples, some, strict=True):
                own = Clip(load.data).samples
                row[: len(own)] = own
            self._keep(self.encode(samples), [load.pages for load in some])

    def send(self, _step: SchedulerOutput) -> bool:
        """Return False: no token stands for a clip."""
        return False

    def place(self, batch: AttentionBatch) -> None:
        """Do nothing, since no token stands for a clip."""

    @torch.inference_mode()
    def encode(self, samples: npt.NDArray[np.float32]) -> torch.Tensor:
        """Return rows [n · num_rows, hidden] of samples [n, num_samples].

        The next call may overwrite them."""
        there = to_device(torch.from_numpy(samples), self._device)
        size = next((n for n in self._graphs if n >= len(samples)), None)
        if size is None:
            rows: torch.Tensor = self.encoder(there)
            return rows
        graph, own, rows = self._graphs[size]
        own[: len(samples)] = there
        graph.replay()
        return rows[: len(samples) * self.encoder.num_rows]

    @torch.inference_mode()
    def _keep(self, rows: torch.Tensor, pages: Sequence[Sequence[int]]) -> None:
        """Write keys and values of clips' rows into their pages."""
        nth = np.arange(self._blocks_per_page)
        places = np.arange(self.encoder.num_rows)
        blocks = np.array(pages)[:, :, None] * self._blocks_per_page + nth
        own = blocks.reshape(len(pages), -1)[:, places // self._block_size]
        there = np.stack((own.ravel(), np.tile(places % self._block_size, len(pages))))
        which, where = to_device(torch.from_numpy(there), self._device)
        for reader in self._readers:
            reader.keep(rows, which, where)

    def rehearse(self) -> None:
        """Encode as many clips as there may be at once, kernel by kernel, into the first pages."""
        count = -(-self.encoder.num_rows // (self._block_size * self._blocks_per_page))
        graphs, self._graphs = self._graphs, {}
        for n in (*CAPTURED, MOST_CLIPS):
            silence = np.zeros((n, self.encoder.encoder.num_samples), np.float32)
            self._keep(self.encode(silence), [[0] * count] * n)
        self._graphs = graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a graph for each of some numbers of clips, on the current stream."""
        if self._graphs:
            return
        pool: Any = torch.cuda.graph_pool_handle()
        most = self.encoder.encoder.num_samples
        for n in CAPTURED:
            samples = torch.zeros(n, most, dtype=torch.float32, device=self._device)
            graph, rows = capture(functools.partial(self.encoder, samples), pool)
            self._graphs[n] = graph, samples, rows
