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
from toolkit.worker.step_sizes import CLIPS

NO_SLOT = -1


class Clips:
    """Encodes the clips that a step loads, before its tokens read them."""

    def __init__(self, model: Decoder, blocks_per_page: int, block_size: int) -> None:
        assert model.encoder is not None, "the model hears"
        self.encoder: AudioEncoderModule = model.encoder
        self._readers = [one for one in model.modules() if isinstance(one, CrossAttentionMix)]
        self._device = self.encoder.mel.window.device
        self._page_tokens = blocks_per_page * block_size
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        """(Graph, samples, slots) by number of clips."""

    def apply(self, step: SchedulerOutput) -> None:
        """Encode the clips of a step."""
        loads = [load for load in step.loads if isinstance(load, Encode)]
        for first in range(0, len(loads), CLIPS[-1]):
            some = loads[first : first + CLIPS[-1]]
            clips = [Clip(load.data).samples for load in some]
            self._encode(clips, [load.pages for load in some])

    def send(self, _step: SchedulerOutput) -> bool:
        """Return False: no token stands for a clip."""
        return False

    def place(self, batch: AttentionBatch) -> None:
        """Do nothing, since no token stands for a clip."""

    @torch.inference_mode()
    def _encode(
        self, clips: Sequence[npt.NDArray[np.float32]], pages: Sequence[Sequence[int]]
    ) -> None:
        """Compute clips into their pages: by a graph for as many or more, if there is one."""
        size = next((n for n in self._graphs if n >= len(clips)), len(clips))
        samples = np.zeros((size, self.encoder.encoder.num_samples), np.float32)
        slots = np.full((size, self.encoder.num_rows), NO_SLOT, np.int64)
        for row, own, clip, held in zip(samples, slots, clips, pages, strict=False):
            row[: len(clip)] = clip
            first = np.array(held) * self._page_tokens
            own[:] = (first[:, None] + np.arange(self._page_tokens)).ravel()[: len(own)]
        sound, places = (
            to_device(torch.from_numpy(one), self._device) for one in (samples, slots.ravel())
        )
        if size not in self._graphs:
            self._compute(sound, places)
            return
        graph, *inputs = self._graphs[size]
        for own_input, given in zip(inputs, (sound, places), strict=True):
            own_input.copy_(given, non_blocking=True)
        graph.replay()

    def _compute(self, samples: torch.Tensor, slots: torch.Tensor) -> None:
        """Compute keys and values of clips. Can be captured.

        samples: [n, num_samples] fp32; slots: int64 [n · num_rows]."""
        rows = self.encoder(samples)
        for reader in self._readers:
            reader.keep(rows, slots)

    def rehearse(self) -> None:
        """Encode silence, as many clips as there may be at once, kernel by kernel."""
        graphs, self._graphs = self._graphs, {}
        count = -(-self.encoder.num_rows // self._page_tokens)
        for n in CLIPS:
            self._encode([np.zeros(1, np.float32)] * n, [[0] * count] * n)
        self._graphs = graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a graph for each of some numbers of clips, on the current stream."""
        if self._graphs:
            return
        pool: Any = torch.cuda.graph_pool_handle()
        rows, length = self.encoder.num_rows, self.encoder.encoder.num_samples
        for n in CLIPS:
            samples = torch.zeros(n, length, dtype=torch.float32, device=self._device)
            slots = torch.full((n * rows,), NO_SLOT, dtype=torch.int64, device=self._device)
            graph, _ = capture(functools.partial(self._compute, samples, slots), pool)
            self._graphs[n] = graph, samples, slots
