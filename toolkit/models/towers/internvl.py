"""InternVL 3's tower (arXiv:2504.10479): InternViT (arXiv:2312.14238), and an MLP of squares."""

from typing import Any, ClassVar, Literal

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, HeadNorm, Norm, Table
from toolkit.models.towers.fields import ProjectorConfig, TowerConfig, require_heads
from toolkit.models.towers.parts import Block, Lead, Merger, Patches, Tower
from toolkit.weights.source import Source

NAME, PROJECTOR = "vision_tower", "multi_modal_projector"  # of its tensors
TOWERS = ("", "internvl_vision")
FAMILY = "internvl"
SECTIONS: tuple[int, ...] = ()
INTERLEAVED = False
_QK_EPS, _PROJECTOR_EPS = 1e-6, 1e-5


class Config(TowerConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "num_channels": (3,),
        "use_absolute_position_embeddings": (True,),
        "use_mean_pooling": (True,),  # else there is a norm after the last block
    }

    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    attention_bias: bool = False
    use_qk_norm: bool = False
    hidden_act: str = "gelu"
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    layer_norm_eps: float = 1e-6
    image_size: int | list[int] = 448
    patch_size: int | list[int] = 14
    use_mask_token: Any = None
    """The checkpoint has a token for training."""

    def __post_init__(self) -> None:
        require_heads(self.hidden_size, self.num_attention_heads)

    @property
    def patch(self) -> int:
        """Pixels of a patch's side."""
        return _side("patch_size", self.patch_size)

    @property
    def side(self) -> int:
        """Patches of a side of a tile."""
        return _side("image_size", self.image_size) // self.patch


class Seeing(ProjectorConfig, kw_only=True):
    image_token_id: int | None = 151667
    downsample_ratio: float = 0.5
    vision_feature_select_strategy: Literal["default"] = "default"


def describe(config: Config, seeing: Seeing) -> Tower:
    merge = round(1 / seeing.downsample_ratio) if seeing.downsample_ratio > 0 else 0
    if not merge or merge * seeing.downsample_ratio != 1 or not config.side or config.side % merge:
        raise ValueError(
            f"downsample_ratio is {seeing.downsample_ratio}: tk supports 1 / n, for n that divides "
            f"the {config.side} patches of a tile's side"
        )
    taps = seeing.taps(config.num_hidden_layers)
    if len(taps) > 1:
        raise ValueError(f"vision_feature_layer is {list(taps)}, and tk supports one for internvl")
    hidden, out = config.hidden_size, seeing.decoder.hidden_size

    def norm(name: str) -> Norm:
        is_centered = config.norm_type == "layer_norm"
        return Norm(
            name, hidden, config.layer_norm_eps, is_centered=is_centered, has_bias=is_centered
        )

    def block(name: str) -> Block:
        attention = f"{name}.attention"
        q, k, v = (Source(f"{attention}.{part}_proj") for part in "qkv")
        up, down = Source(f"{name}.mlp.fc1"), Source(f"{name}.mlp.fc2")
        qk_norm = HeadNorm(f"{attention}.q_norm", f"{attention}.k_norm", _QK_EPS, span="all")
        return Block(
            norm(f"{name}.layernorm_before"),
            (q, k, v),
            Source(f"{attention}.projection_layer"),
            norm(f"{name}.layernorm_after"),
            MLP(config.intermediate_size, config.hidden_act, up, down, bias=True),
            qkv_bias=config.attention_bias,
            qk_norm=qk_norm if config.use_qk_norm else None,
            scales=(f"{name}.lambda_1", f"{name}.lambda_2"),
        )

    layers, embeddings, used = f"{NAME}.encoder.layer", f"{NAME}.embeddings", taps[0]
    dropped = (f"{layers}.{index}." for index in range(used, config.num_hidden_layers))
    patches = Source(f"{embeddings}.patch_embeddings.projection")
    squares = Norm(
        f"{PROJECTOR}.layer_norm",
        hidden * merge**2,
        _PROJECTOR_EPS,
        is_centered=True,
        has_bias=True,
    )
    return Tower(
        hidden=hidden,
        num_heads=config.num_attention_heads,
        out=out,
        patches=Patches(patches, config.patch, bias=True),
        blocks=[block(f"{layers}.{index}") for index in range(used)],
        merger=Merger(
            squares,
            Source(f"{PROJECTOR}.linear_1"),
            Source(f"{PROJECTOR}.linear_2"),
            seeing.projector_hidden_act,
            norms_squares=True,
            size=out,
        ),
        merge=merge,
        lead=Lead(f"{embeddings}.cls_token", more_dimensions=2),
        table=Table(f"{embeddings}.position_embeddings", 1 + config.side**2, first=1, is_bare=True),
        has_fixed_size=True,
        is_tiled=True,
        taps=taps,
        unused=(*dropped, f"{embeddings}.mask_token"),
    )


def _side(name: str, given: int | list[int]) -> int:
    """Return the side of a square. Raises ValueError for another shape."""
    sides = [given, given] if isinstance(given, int) else given
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        raise ValueError(f"vision_config: {name} is {given}, and tk supports squares")
    return sides[0]
