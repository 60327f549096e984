"""Memory of towers for pictures and clips, and of what they compute."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config import EngineConfig
from toolkit.inventory.checkpoint import Checkpoint
from toolkit.inventory.step_memory import GRAPH_LAYER_BYTES
from toolkit.models.audio import CHUNKS_AT_ONCE, HOP, STRIDE, AudioEncoder, SoundTower
from toolkit.models.config.towers import Sight
from toolkit.models.describe import FeatureEncoder
from toolkit.pictures.families import find_family
from toolkit.pictures.settings import read_processor
from toolkit.scheduler.encoder_cache import ROWS_PER_PAGE
from toolkit.worker.step_sizes import CLIPS, picture_rows

SPECTRUM_BYTES = 16 * 201  # of a frame: complex numbers, and their powers


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """Bytes of a tower on one device."""

    weights: int
    table: int  # of encoded pictures
    step: int  # to encode the largest picture, and CUDA graphs


def tower_memory(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    type_bytes: int,
    max_model_len: int,
    *,
    on_gpu: bool,
) -> TowerMemory | None:
    """Return the memory of a model's tower; None if its prompts are text."""
    sight = checkpoint.sight
    if sight is None or not checkpoint.sees or not engine.pictures.most_pictures:
        return None
    tower = sight.tower
    page_bytes = ROWS_PER_PAGE * tower.row_size * type_bytes
    most = min(_most_rows(checkpoint, engine, sight), max_model_len)
    wanted = int(engine.pictures.mm_cache_gib * 2**30) // page_bytes
    num_pages = max(-(-most // ROWS_PER_PAGE), wanted)
    step = 0
    if on_gpu:
        each = 8 * tower.hidden + 2 * max((block.mlp.size for block in tower.blocks), default=0)
        row_bytes = tower.merge**2 * each * type_bytes
        step = most * row_bytes
        if not engine.device.enforce_eager:
            captured = picture_rows(tower.fixed_squares)
            step += len(captured) * len(tower.blocks) * GRAPH_LAYER_BYTES
            step += max(captured, default=0) * row_bytes
    # The products of a still picture's frames are one in memory.
    more_frames = (tower.patches.frames - 1) * tower.hidden * tower.patches.pixels
    numbers = checkpoint.tower_parameters - more_frames
    return TowerMemory(numbers * type_bytes, num_pages * page_bytes, step)


def sound_memory(
    tower: FeatureEncoder | None,
    engine: EngineConfig,
    type_bytes: int,
    max_model_len: int,
    *,
    on_gpu: bool,
) -> TowerMemory | None:
    """Return the memory of a tower for clips; None if there is none. Its weights: the model's."""
    if not isinstance(tower, SoundTower):
        return None
    page_bytes = ROWS_PER_PAGE * tower.out * type_bytes
    samples = tower.most_samples(max_model_len)
    most = tower.num_rows(samples)
    num_pages = max(
        -(-most // ROWS_PER_PAGE), int(engine.pictures.mm_cache_gib * 2**30) // page_bytes
    )
    step = 0
    if on_gpu:
        widest = max(block.mlp.size for block in tower.blocks)
        step = most * (8 * tower.hidden + 2 * widest) * type_bytes
        step += samples // HOP * (SPECTRUM_BYTES + 4 * tower.num_mels)
        of_chunk = tower.channels * tower.num_mels * tower.chunk // 4
        step += CHUNKS_AT_ONCE * 2 * of_chunk * type_bytes
    return TowerMemory(0, num_pages * page_bytes, step)


def encoder_step(encoder: FeatureEncoder | None, engine: EngineConfig, type_bytes: int) -> int:
    """Return the bytes that a GPU needs to encode clips, and for the CUDA graphs of it."""
    if not isinstance(encoder, AudioEncoder):
        return 0
    widest = max(block.mlp.size for block in encoder.blocks)
    of_rows = encoder.num_rows * (8 * encoder.hidden + 2 * widest) * type_bytes
    of_frames = STRIDE * encoder.num_rows * (SPECTRUM_BYTES + 2 * encoder.hidden * type_bytes)
    clips = CLIPS[-1] * (of_rows + of_frames)
    if engine.device.enforce_eager:
        return clips
    return 2 * clips + len(CLIPS) * len(encoder.blocks) * GRAPH_LAYER_BYTES


def _most_rows(checkpoint: Checkpoint, engine: EngineConfig, sight: Sight) -> int:
    """Return the rows of the largest picture; 0 if they are not known."""
    if checkpoint.folder is None:
        return 0  # unknown: the file is on the hub
    family, tower = find_family(sight.family), sight.tower
    processor = read_processor(
        checkpoint.folder,
        sight.family,
        engine.pictures.mm_processor_kwargs or {},
        patch_size=tower.patches.size,
        merge=tower.merge,
    )
    return 0 if family.problem(processor) else tower.num_rows(family.largest_grid(processor))
