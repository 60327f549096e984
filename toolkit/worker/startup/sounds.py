"""The tower for clips of a model whose prompts have them as tokens: its part of the memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.models.config.sounds import Sound
from toolkit.models.sound_tower import SoundTowerModule
from toolkit.scheduler.encoder_cache import ROWS_PER_PAGE
from toolkit.speech.clip import SAMPLE_RATE
from toolkit.worker.features import FeatureTable
from toolkit.worker.info import SoundInfo
from toolkit.worker.sound_encoder import SoundEncoder
from toolkit.worker.startup.setup import Setup


@dataclass(frozen=True, slots=True)
class SoundPlan:
    """The memory for what a tower computes of clips."""

    sound: Sound
    num_samples: int  # of the longest clip
    most_rows: int
    page_bytes: int
    num_pages: int
    has_axes = False
    both_ways = False

    @classmethod
    def of(cls, setup: Setup) -> SoundPlan | None:
        """Return the plan of a model; None if no token stands for sound."""
        sound: Sound | None = setup.model_config.sound
        if sound is None:
            return None
        tower = sound.tower
        num_samples = tower.most_samples(setup.max_model_len)
        most = tower.num_rows(num_samples)
        page_bytes = ROWS_PER_PAGE * tower.out * setup.dtype.itemsize
        wanted = int(setup.config.pictures.mm_cache_gib * 2**30)
        num_pages = max(-(-most // ROWS_PER_PAGE), wanted // page_bytes)
        return cls(sound, num_samples, most, page_bytes, num_pages)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of rows."""
        return self.num_pages * self.page_bytes

    @property
    def info(self) -> SoundInfo:
        tower = self.sound.tower
        return SoundInfo(
            token_id=self.sound.token_id,
            seconds=self.num_samples / SAMPLE_RATE,
            chunk=tower.chunk,
            num_pages=self.num_pages,
        )

    def table(self, tower: SoundTowerModule, device: torch.device) -> FeatureTable:
        encoder = SoundEncoder(tower, device)
        return FeatureTable(encoder, self.num_pages, ROWS_PER_PAGE, self.most_rows)
