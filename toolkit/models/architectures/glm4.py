"""GLM-4-0414 and GLM-Z1 (GLM Team, 2025): GLM-4-9B with norms before and after products."""

from toolkit.models.architectures import glm
from toolkit.models.architectures.phi3 import fused_mlp
from toolkit.models.describe import Branch, Decoder, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("Glm4ForCausalLM", "Glm4Model")
Config = glm.Config


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        before, after, mlp_before, mlp_after = (
            rms_norm(config, f"{name}.{part}_layernorm")
            for part in ("input", "post_self_attn", "post_attention", "post_mlp")
        )
        attn = glm.glm_attention(config, f"{name}.self_attn")
        mlp = fused_mlp(config, f"{name}.mlp")
        return ((Branch(attn, before, after),), (Branch(mlp, mlp_before, mlp_after),))

    return decoder(config, layer, rms_norm(config, "model.norm"))
