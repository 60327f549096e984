"""What a model's config.json says: its types checked, its old spellings read, and what it leaves out filled in
with the defaults that Transformers has for that kind of model. Reading it without Transformers saves seconds at
every start.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from toolkit.kernels import cpu

Size = Annotated[int, msgspec.Meta(ge=1)]


class ArchitectureConfig(msgspec.Struct, kw_only=True):
    """What every kind has."""

    architectures: list[str]
    dtype: str | None = None
    """The type that the weights were saved in, by PyTorch's name for it."""
    torch_dtype: str | None = None
    """An old spelling of `dtype`, which is where its value is."""
    vocab_size: Size
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.torch_dtype


def auto_dtype(config: ArchitectureConfig, *, on_gpu: bool) -> str:
    """The type that weights and activations have when nothing is said.

    On a GPU the checkpoint's own 16-bit type, or bfloat16 when it has none. On a CPU bfloat16 for what was saved in it, where
    our kernels multiply it, and float32 for all else: float16 has more digits than bfloat16 and no fast products there.
    """
    if on_gpu:
        return config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"
    return "bfloat16" if config.dtype == "bfloat16" and cpu.available() else "float32"


class GPT2Config(ArchitectureConfig, kw_only=True):
    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Size = 12
    n_head: Size = 12
    n_inner: Size | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    hidden_size: Size | None = None
    max_position_embeddings: Size | None = None
    num_attention_heads: Size | None = None
    num_hidden_layers: Size | None = None
    """The names that other kinds have for n_embd, n_positions, n_head and n_layer; they win where both are given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hidden_size = self.n_embd = self.hidden_size or self.n_embd
        self.max_position_embeddings = self.n_positions = (
            self.max_position_embeddings or self.n_positions
        )
        self.num_attention_heads = self.n_head = self.num_attention_heads or self.n_head
        self.num_hidden_layers = self.n_layer = self.num_hidden_layers or self.n_layer
        _head_size(self.hidden_size, self.num_attention_heads)


class LlamaConfig(ArchitectureConfig, kw_only=True):
    vocab_size: Size = 32000
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Size = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    """None: as many as there are attention heads."""
    head_dim: Size | None = None
    """None: hidden_size / num_attention_heads."""
    hidden_act: str = "silu"
    max_position_embeddings: Size = 2048
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """In tokens."""
    layer_types: list[str] | None = None
    """For each layer `full_attention` or `sliding_attention`; None: all alike."""
    rope_parameters: dict[str, Any] | None = None
    """Always has `rope_type` and `rope_theta`, and what else the type of scaling takes."""

    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Size | None = None
    """Old spellings: what they say is in `rope_parameters`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is None:
            self.head_dim = _head_size(self.hidden_size, self.num_attention_heads)
        if self.layer_types is not None:
            self.layer_types = _checked_layer_types(self.layer_types, self.num_hidden_layers)
        self.rope_parameters = self._whole_rope_parameters()

    def _whole_rope_parameters(self) -> dict[str, Any]:
        parameters = dict(self.rope_scaling or self.rope_parameters or {})
        if any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError("rope_parameters that differ from layer to layer are not supported")
        parameters.setdefault("rope_theta", self.rope_theta or 10000.0)
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if self.partial_rotary_factor is not None:
            parameters.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
            parameters.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if self.original_max_position_embeddings is not None:
                parameters["original_max_position_embeddings"] = (
                    self.original_max_position_embeddings
                )
        return parameters


class MistralConfig(LlamaConfig, kw_only=True):
    intermediate_size: Size = 14336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: int | None = 4096


class Qwen2Config(LlamaConfig, kw_only=True):
    vocab_size: Size = 151936
    intermediate_size: Size = 22016
    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size = 32768
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    """Layers, from the first on, that attend to the whole context, where `layer_types` does not say."""

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            first = (
                self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
            )
            self.layer_types = [
                "sliding_attention" if i >= first else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
        super().__post_init__()


class Qwen3Config(Qwen2Config, kw_only=True):
    head_dim: Size | None = 128


class BertConfig(ArchitectureConfig, kw_only=True):
    vocab_size: Size = 30522
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    hidden_act: str = "gelu"
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    num_labels: Size = 2
    """Of a classifier; as many as `id2label` names, where it does."""
    id2label: dict[str, Any] | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None
    """Of a cross-encoder's score: a class of torch.nn; its newer place is `sentence_transformers.activation_fn`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _head_size(self.hidden_size, self.num_attention_heads)
        if self.id2label is not None:
            self.num_labels = len(self.id2label)

    @property
    def score_activation(self) -> str:
        """The name of a class of torch.nn."""
        given = (self.sentence_transformers or {}).get("activation_fn")
        return str(given or self.sbert_ce_default_activation_function or "Sigmoid").rpartition(".")[
            2
        ]


class XLMRobertaConfig(BertConfig, kw_only=True):
    pad_token_id: int = 1


class RobertaConfig(XLMRobertaConfig, kw_only=True):
    vocab_size: Size = 50265


KINDS: dict[str, type[ArchitectureConfig]] = {
    "gpt2": GPT2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "xlm-roberta": XLMRobertaConfig,
}
"""By config.json's `model_type`."""


def parse_config(raw: dict[str, Any]) -> ArchitectureConfig:
    """The config that a config.json holds. Raises ValueError for what is of a wrong type, contradictory or not
    supported.
    """
    kind = KINDS.get(str(raw.get("model_type")))
    if kind is None:
        raise ValueError(
            f"its model_type is {raw.get('model_type')!r}; these are known: {', '.join(KINDS)}"
        )
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from None


def _head_size(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads


def _checked_layer_types(layer_types: list[str], num_layers: int) -> list[str]:
    """With the old name for full attention made new."""
    layer_types = ["full_attention" if kind == "attention" else kind for kind in layer_types]
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has {', '.join(unknown)}, which is not supported")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return layer_types
