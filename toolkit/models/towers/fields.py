"""Fields of config.json that several towers share. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolkit.models.towers.parts import Rotation


class TowerConfig(msgspec.Struct, kw_only=True):
    """Fields of every tower's config: `vision_config` of a config.json."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {}  # as in `ArchitectureConfig`
    model_type: str = ""
    dtype: str | None = None


class SeeingConfig(msgspec.Struct, kw_only=True):
    """Fields of a config.json that are neither the tower's nor the decoder's."""

    image_token_id: int | None = None
    image_token_index: int | None = None
    """Older name of `image_token_id`."""

    decoder: Any = None  # its `ArchitectureConfig`. Not in the file
    both_ways: ClassVar[bool] = False  # a picture's tokens see each other

    def __post_init__(self) -> None:
        if self.image_token_id is None:
            self.image_token_id = self.image_token_index

    @property
    def marks(self) -> tuple[int, int] | None:
        """Tokens before and after a picture, the first of which stands for it in prompts."""
        return None


class ProjectorConfig(SeeingConfig, kw_only=True):
    """Fields of LLaVA's projector, and of those that follow it (Liu et al., 2023)."""

    projector_hidden_act: str = "gelu"
    vision_feature_layer: int | tuple[int, ...] = -1
    multimodal_projector_bias: bool = True

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return after how many of a tower's layers its patches are read. Raises ValueError."""
        given = self.vision_feature_layer
        layers = (given,) if isinstance(given, int) else given
        found = tuple(n if n >= 0 else num_layers + 1 + n for n in layers)
        if not found or not all(0 <= n <= num_layers for n in found):
            raise ValueError(
                f"vision_feature_layer is {given}, and vision_config has {num_layers} layers"
            )
        return found


def axial_rotation(
    parameters: Mapping[str, Any] | None, theta: float | None = None, **options: Any
) -> Rotation:
    """Return the rotation of `rope_parameters` in a vision_config. Raises ValueError.

    theta: where the parameters have none; options: of `Rotation`."""
    given = parameters or {}
    kind = given.get("rope_type", given.get("type", "axial"))
    if kind not in ("axial", "default"):
        raise ValueError(f"vision_config has the rope_type {kind!r}, and tk supports 'axial'")
    return Rotation(float(given.get("rope_theta") or theta or 10000.0), **options)


def require_heads(width: int, num_heads: int, multiple: int = 1) -> None:
    """Raise ValueError if features are not a multiple of a number for each head."""
    if width % (multiple * num_heads):
        raise ValueError(
            f"vision_config: {width} features are not a multiple of {multiple} for each of "
            f"{num_heads} heads"
        )
