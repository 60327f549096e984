"""Idefics 3's tower (arXiv:2408.12637): SigLIP's (arXiv:2303.15343), and a product of squares.

Transformers finds the position of a patch by its part of the side, for pictures of any size. Tiles
have the size of the table, so that each patch has its own."""

from typing import Any, ClassVar

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Norm, Table
from toolkit.models.towers.fields import SeeingConfig, TowerConfig, require_heads
from toolkit.models.towers.parts import Block, Patches, Projection, Tower
from toolkit.weights.source import Source

NAME, PROJECTOR = "vision_model", "connector"  # of its tensors
TOWERS: tuple[str, ...] = ()
FAMILY = "idefics3"
SECTIONS: tuple[int, ...] = ()
INTERLEAVED = False


class Config(TowerConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"num_channels": (3,)}

    hidden_size: Size = 1152
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 16
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    max_image_size: Any = None
    size: Any = None
    """Settings of the image processor, which its own file has, too."""

    def __post_init__(self) -> None:
        require_heads(self.hidden_size, self.num_attention_heads)

    @property
    def side(self) -> int:
        """Patches of a side of a tile."""
        return self.image_size // self.patch_size


class Seeing(SeeingConfig, kw_only=True):
    image_token_id: int | None = 128257
    scale_factor: Size = 2


def describe(config: Config, seeing: Seeing) -> Tower:
    if not config.side or config.side % seeing.scale_factor:
        raise ValueError(
            f"scale_factor is {seeing.scale_factor}, which does not divide the {config.side} "
            "patches of a tile's side"
        )

    def norm(name: str) -> Norm:
        size, eps = config.hidden_size, config.layer_norm_eps
        return Norm(name, size, eps, is_centered=True, has_bias=True)

    def block(name: str) -> Block:
        q, k, v, out = (Source(f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "out"))
        up, down = Source(f"{name}.mlp.fc1"), Source(f"{name}.mlp.fc2")
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, bias=True)
        return Block(norm(f"{name}.layer_norm1"), (q, k, v), out, norm(f"{name}.layer_norm2"), mlp)

    embeddings, layers = f"{NAME}.embeddings", range(config.num_hidden_layers)
    return Tower(
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        out=seeing.decoder.hidden_size,
        patches=Patches(Source(f"{embeddings}.patch_embedding"), config.patch_size, bias=True),
        blocks=[block(f"{NAME}.encoder.layers.{index}") for index in layers],
        merger=Projection(
            norm(f"{NAME}.post_layernorm"), Source(f"{PROJECTOR}.modality_projection.proj")
        ),
        merge=seeing.scale_factor,
        table=Table(f"{embeddings}.position_embedding", config.side**2),
        has_fixed_size=True,
        is_tiled=True,
        unused=(f"{embeddings}.position_ids",),
    )
