"""Gemma 3's tower (arXiv:2503.19786): SigLIP's (arXiv:2303.15343), and means of squares."""

import math
from typing import ClassVar

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Norm, Table
from toolkit.models.towers.fields import SeeingConfig, TowerConfig, require_heads
from toolkit.models.towers.parts import Block, Patches, Pool, Tower
from toolkit.weights.source import Source

NAME, PROJECTOR = "vision_tower", "multi_modal_projector"  # of its tensors
TOWERS = ("", "siglip_vision_model")
FAMILY = "gemma3"
SECTIONS: tuple[int, ...] = ()
INTERLEAVED = False


class Config(TowerConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"num_channels": (3,)}

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    image_size: Size = 224
    patch_size: Size = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_use_head: bool = True
    """The checkpoint has a head, which Gemma 3 does not use."""

    def __post_init__(self) -> None:
        require_heads(self.hidden_size, self.num_attention_heads)

    @property
    def side(self) -> int:
        """Patches of a side of a picture."""
        return self.image_size // self.patch_size


class Seeing(SeeingConfig, kw_only=True):
    both_ways: ClassVar[bool] = True

    image_token_index: int | None = 262144
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    mm_tokens_per_image: Size = 256

    @property
    def marks(self) -> tuple[int, int]:
        return self.boi_token_index, self.eoi_token_index


def describe(config: Config, seeing: Seeing) -> Tower:
    side = math.isqrt(seeing.mm_tokens_per_image)
    if side**2 != seeing.mm_tokens_per_image or config.side % side:
        raise ValueError(
            f"mm_tokens_per_image is {seeing.mm_tokens_per_image}: tk supports squares of a number "
            f"that divides the {config.side} patches of a picture's side"
        )

    def norm(name: str) -> Norm:
        size, eps = config.hidden_size, config.layer_norm_eps
        return Norm(name, size, eps, is_centered=True, has_bias=True)

    def block(name: str) -> Block:
        q, k, v, out = (Source(f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "out"))
        up, down = Source(f"{name}.mlp.fc1"), Source(f"{name}.mlp.fc2")
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, bias=True)
        return Block(norm(f"{name}.layer_norm1"), (q, k, v), out, norm(f"{name}.layer_norm2"), mlp)

    means = f"{PROJECTOR}.mm_soft_emb_norm"
    weight = f"{PROJECTOR}.mm_input_projection_weight"
    embeddings, layers = f"{NAME}.embeddings", range(config.num_hidden_layers)
    return Tower(
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        out=seeing.decoder.hidden_size,
        patches=Patches(Source(f"{embeddings}.patch_embedding"), config.patch_size, bias=True),
        blocks=[block(f"{NAME}.encoder.layers.{index}") for index in layers],
        merger=Pool(
            norm(f"{NAME}.post_layernorm"),
            Norm(means, config.hidden_size, config.layer_norm_eps, offset=1.0),
            Source(weight, transpose=True, is_bare=True),
        ),
        merge=config.side // side,
        table=Table(f"{embeddings}.position_embedding", config.side**2),
        has_fixed_size=True,
        unused=(f"{NAME}.head.", f"{embeddings}.position_ids"),
    )
