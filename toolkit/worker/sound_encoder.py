"""Runs a tower for clips whose rows stand for tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from toolkit.hardware.memory import to_device
from toolkit.models.audio import HOP
from toolkit.models.sound_tower import SoundTowerModule
from toolkit.models.towers.parts import Grid
from toolkit.speech.clip import Clip


class SoundEncoder:
    """Computes clips with a tower, kernel by kernel: they have any lengths."""

    def __init__(self, tower: SoundTowerModule, device: torch.device) -> None:
        self._tower, self.device, self.dtype = tower, device, tower.dtype
        self.row_size = tower.tower.out

    @torch.inference_mode()
    def encode(self, data: Sequence[bytes], _grids: Sequence[Grid]) -> torch.Tensor:
        """Return the rows [num_rows, row size] of clips, one after the other.

        data: see `speech.clip.Clip`."""
        clips = [torch.from_numpy(Clip(one).samples) for one in data]
        rows: torch.Tensor = self._tower([to_device(clip, self.device) for clip in clips])
        return rows

    def num_rows(self, grid: Grid) -> int:
        """Return the number of a clip's rows."""
        return grid[0]

    def rehearse(self, num_rows: int) -> None:
        """Compute silence of as many rows."""
        tower = self._tower.tower
        samples = num_rows * tower.chunk * HOP // tower.rows_of_chunk
        self.encode([Clip.of(np.zeros(samples, np.float32)).data], [(num_rows, 1)])

    def capture(self) -> None:
        """Do nothing, since there are no graphs."""
