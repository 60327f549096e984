"""GPT-J (Wang & Komatsuzaki, 2021): attention and MLP in parallel, interleaved partial rotation."""

from typing import ClassVar

from toolkit.models.architectures import gpt2
from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Attention, Branch, Decoder, Head, Layer, Rope
from toolkit.models.parts import decoder, layer_norm
from toolkit.weights.source import Source, by_head, pairs_apart

ARCHITECTURES = ("GPTJForCausalLM", "GPTJModel")


class Config(gpt2.Config, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"rotary": (True,)}

    vocab_size: Size = 50400
    n_positions: Size = 2048
    n_embd: Size = 4096
    n_layer: Size = 28
    n_head: Size = 16
    rotary_dim: Size | None = 64
    tie_word_embeddings: bool = False


def describe(config: Config) -> Decoder:
    hidden, heads, eps = config.n_embd, config.n_head, config.layer_norm_epsilon
    size = hidden // heads
    rotary = config.rotary_dim or size
    parameters = {"rope_theta": 10000.0, "partial_rotary_factor": rotary / size}
    rope, order = Rope(parameters, size, config.n_positions), pairs_apart(size, rotary)

    def layer(name: str, index: int) -> Layer:
        q, k = (Source(f"{name}.attn.{part}_proj", by_head(None, heads, order)) for part in "qk")
        v, out = Source(f"{name}.attn.v_proj"), Source(f"{name}.attn.out_proj")
        up, down = Source(f"{name}.mlp.fc_in"), Source(f"{name}.mlp.fc_out")
        inner, norm = config.n_inner or 4 * hidden, layer_norm(config, f"{name}.ln_1", eps)
        attn = Attention(heads, heads, size, q, k, v, out, size**-0.5, rope=rope)
        mlp = MLP(inner, config.activation_function, up, down, bias=True)
        return ((Branch(attn, norm), Branch(mlp, norm)),)

    return decoder(
        config,
        layer,
        layer_norm(config, "transformer.ln_f", eps),
        embed="transformer.wte",
        layers_name="transformer.h",
        head=Head(bias=True),
    )
