"""The tower of a model that sees: its settings, its weights, and its part of the memory."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from toolkit.config.engine import PictureConfig
from toolkit.distributed import SINGLE, SINGLE_STAGE, parallel
from toolkit.errors import CheckpointError, ConfigError
from toolkit.models import describe
from toolkit.models.config.model_config import ArchitectureConfig
from toolkit.models.config.registry import describe as describe_model
from toolkit.models.config.towers import Sight
from toolkit.models.model import default_dtype
from toolkit.models.tower import TowerModel
from toolkit.pictures.families import find_family
from toolkit.pictures.settings import FILES, ProcessorSettings, read_processor
from toolkit.pictures.tokens import PictureTokens, find_frame, find_tokens
from toolkit.scheduler.encoder_cache import ROWS_PER_PAGE
from toolkit.weights.loading.loader import find_weights
from toolkit.weights.names import is_of_tower
from toolkit.weights.quantization import unquantized
from toolkit.worker.features import FeatureTable
from toolkit.worker.info import SightInfo
from toolkit.worker.picture_encoder import PictureEncoder
from toolkit.worker.startup.loading import Fill
from toolkit.worker.startup.setup import Setup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """A tower to load, and the memory for what it computes."""

    sight: Sight
    tokens: PictureTokens
    processor: ProcessorSettings
    most_rows: int
    page_bytes: int
    num_pages: int

    @classmethod
    def of(cls, setup: Setup) -> TowerPlan | None:
        """Return the plan of a model; None if its prompts are text.

        Raises CheckpointError if the image processor cannot be used."""
        given = setup.config.pictures
        found = read_pictures(setup.folder, setup.model_config, given)
        if found is None:
            return None
        sight, tokens, processor = found
        family, side = find_family(sight.family), sight.tower.side
        rows, columns = sight.tower.patch_grid(family.tile_grid(processor))
        if sight.tower.has_fixed_size and (rows, columns) != (side, side):
            raise CheckpointError(
                f"{setup.folder}: the image processor's pictures have {rows} x {columns} patches, "
                f"and the tower takes {side} x {side}."
            )
        most = min(tokens.num_rows(family.largest_grid(processor)), setup.max_model_len)
        wanted = int(given.mm_cache_gib * 2**30)
        page_bytes = ROWS_PER_PAGE * sight.tower.row_size * setup.dtype.itemsize
        num_pages = max(-(-most // ROWS_PER_PAGE), wanted // page_bytes)
        plan = cls(sight, tokens, processor, most, page_bytes, num_pages)
        plan.require_layers(setup)
        if sight.both_ways and most > setup.token_budget:
            raise ConfigError(
                f"--max-num-batched-tokens is {setup.token_budget}, and a step must have all "
                f"{most} tokens of a picture. Use at least {most}, or --limit-mm-per-prompt "
                "'{\"image\": 0}' to take text alone.",
                param="max_num_batched_tokens",
            )
        return plan

    def require_layers(self, setup: Setup) -> None:
        """Raise ConfigError if later stages than the first would add a picture's rows."""
        described, stage = describe_model(setup.model_config), setup.place.stage
        assert isinstance(described, describe.Decoder)
        most = described.num_layers // stage.count
        if len(self.sight.tower.levels) >= most:
            raise ConfigError(
                f"--pipeline-parallel-size: pictures change the first "
                f"{len(self.sight.tower.levels)} layers, which must be fewer than those of a "
                f"stage ({most}).",
                param="pipeline_parallel_size",
            )

    @property
    def has_axes(self) -> bool:
        return bool(self.sight.axes)

    @property
    def both_ways(self) -> bool:
        return self.sight.both_ways

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of rows."""
        return self.num_pages * self.page_bytes

    @property
    def info(self) -> SightInfo:
        return SightInfo(
            tokens=self.tokens,
            processor=self.processor,
            most_rows=self.most_rows,
            num_pages=self.num_pages,
            both_ways=self.sight.both_ways,
        )

    def build(self, device: torch.device, dtype: torch.dtype) -> TowerModel:
        """Return the tower with uninitialized weights, complete on each rank of a group."""
        with (
            device,
            default_dtype(dtype),
            parallel(SINGLE, SINGLE_STAGE),
            unquantized(),
            torch.inference_mode(),
        ):
            tower = TowerModel(self.sight.tower)
        processor = self.processor
        if processor.rescale_factor is not None:
            assert processor.mean is not None
            assert processor.std is not None
            tower.normalize_by(processor.rescale_factor, processor.mean, processor.std)
        return tower.eval()

    def table(self, tower: TowerModel, device: torch.device) -> FeatureTable:
        encoder = PictureEncoder(tower, device)
        return FeatureTable(encoder, self.num_pages, ROWS_PER_PAGE, self.most_rows)


def read_pictures(
    folder: Path, config: ArchitectureConfig, given: PictureConfig
) -> tuple[Sight, PictureTokens, ProcessorSettings] | None:
    """Return a model's tower, the tokens of pictures, and their image processor.

    None if its prompts are text. Raises CheckpointError if they cannot be used."""
    sight = config.sight
    if not config.is_wrapped or not given.most_pictures:
        return None
    if sight is None and config.sound is not None:
        return None
    if sight is None:
        logger.warning("the model's tower for pictures is left out: prompts are text")
        return None
    if not any((folder / file).is_file() for file in FILES):
        logger.warning("%s has no %s: prompts are text", folder, " or ".join(FILES))
        return None
    tower, more = sight.tower, given.mm_processor_kwargs or {}
    processor = read_processor(
        folder, sight.family, more, patch_size=tower.patches.size, merge=tower.merge
    )
    if problem := find_family(sight.family).problem(processor):
        raise CheckpointError(f"{folder}: the image processor's settings: {problem}.")
    tokens = find_tokens(folder, processor, sight.token_id, tower.num_first_rows)
    if sight.marks is not None:
        count = tokens.num_rows(find_family(sight.family).largest_grid(processor))
        tokens = msgspec.structs.replace(tokens, frame=find_frame(folder, sight.marks, count))
    return sight, tokens, processor


def find_tower_weights(
    setup: Setup, tower: TowerModel, decoder: Collection[str], unused: tuple[str, ...]
) -> Fill:
    """Return a function that loads a tower. `decoder`: names of the decoder's tensors."""
    given = setup.config.model
    others = (part for part in unused if not is_of_tower(part))
    tower.unused = (*others, *tower.tower.unused)
    return find_weights(tower, setup.folder, given.load_format, given.seed, decoder)
