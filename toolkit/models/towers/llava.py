"""LLaVA's tower (arXiv:2304.08485): CLIP's (arXiv:2103.00020), and a projector."""

from typing import Any, ClassVar, Literal

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Norm, Table
from toolkit.models.towers.fields import ProjectorConfig, TowerConfig, require_heads
from toolkit.models.towers.parts import Block, Lead, Merger, Patches, Tower
from toolkit.weights.source import Source

NAME, PROJECTOR = "vision_tower", "multi_modal_projector"  # of its tensors
TOWERS = ("clip_vision_model",)
FAMILY = "clip"
SECTIONS: tuple[int, ...] = ()
INTERLEAVED = False


class Config(TowerConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"num_channels": (3,)}

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    image_size: Size = 224
    patch_size: Size = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_dim: Any = None
    vocab_size: Any = None
    """Fields of parts of CLIP that LLaVA does not have."""

    def __post_init__(self) -> None:
        require_heads(self.hidden_size, self.num_attention_heads)
        if self.image_size < self.patch_size:
            raise ValueError(
                f"vision_config: pictures of {self.image_size} pixels have no patch of "
                f"{self.patch_size}"
            )


class Seeing(ProjectorConfig, kw_only=True):
    image_token_index: int | None = 32000
    vision_feature_layer: int | tuple[int, ...] = -2
    vision_feature_select_strategy: Literal["default", "full"] = "default"


def describe(config: Config, seeing: Seeing) -> Tower:
    def norm(name: str) -> Norm:
        size, eps = config.hidden_size, config.layer_norm_eps
        return Norm(name, size, eps, is_centered=True, has_bias=True)

    def block(name: str) -> Block:
        q, k, v, out = (Source(f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "out"))
        up, down = Source(f"{name}.mlp.fc1"), Source(f"{name}.mlp.fc2")
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, bias=True)
        before = norm(f"{name}.layer_norm1"), norm(f"{name}.layer_norm2")
        return Block(before[0], (q, k, v), out, before[1], mlp)

    taps, embeddings = seeing.taps(config.num_hidden_layers), f"{NAME}.embeddings"
    layers, out, used = f"{NAME}.encoder.layers", seeing.decoder.hidden_size, max(taps)
    num_positions = 1 + (config.image_size // config.patch_size) ** 2
    dropped = (f"{layers}.{index}." for index in range(used, config.num_hidden_layers))
    return Tower(
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        out=out,
        patches=Patches(Source(f"{embeddings}.patch_embedding"), config.patch_size),
        blocks=[block(f"{layers}.{index}") for index in range(used)],
        merger=Merger(
            None,
            Source(f"{PROJECTOR}.linear_1"),
            Source(f"{PROJECTOR}.linear_2"),
            seeing.projector_hidden_act,
            size=out,
            bias=seeing.multimodal_projector_bias,
        ),
        merge=1,
        lead=Lead(
            f"{embeddings}.class_embedding",
            is_kept=seeing.vision_feature_select_strategy == "full",
        ),
        table=Table(f"{embeddings}.position_embedding", num_positions, first=1),
        has_fixed_size=True,
        norm=norm(f"{NAME}.pre_layrnorm"),
        taps=taps,
        unused=(*dropped, f"{NAME}.post_layernorm.", f"{embeddings}.position_ids"),
    )
