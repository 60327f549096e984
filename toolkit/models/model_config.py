"""Parsed config.json: types are checked, old spellings accepted, and defaults are Transformers'.

Reading it without Transformers saves seconds at every start."""

from typing import Annotated, Any

import msgspec

from toolkit.kernels import cpu

Size = Annotated[int, msgspec.Meta(ge=1)]


class ArchitectureConfig(msgspec.Struct, kw_only=True):
    """Fields that every kind has."""

    architectures: list[str]
    dtype: str | None = None  # type that the weights were saved in, by PyTorch's name
    torch_dtype: str | None = None  # old spelling of `dtype`; read that
    vocab_size: Size
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.torch_dtype


def auto_dtype(config: ArchitectureConfig, *, on_gpu: bool) -> str:
    """Return the type of weights and activations for --dtype auto.

    On a GPU: the checkpoint's 16-bit type, else bfloat16. On a CPU: bfloat16 for a bfloat16
    checkpoint if our kernels are available, else float32. float16 would lose precision as
    bfloat16, and has no fast products on a CPU."""
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
    """Other kinds' names for n_embd, n_positions, n_head and n_layer. These win."""

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
    num_key_value_heads: Size | None = None  # None: num_attention_heads
    head_dim: Size | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: Size = 2048
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # tokens
    layer_types: list[str] | None = None
    """`full_attention` or `sliding_attention` for each layer. None: all the same."""
    rope_parameters: dict[str, Any] | None = None
    """`rope_type`, `rope_theta` and the parameters of that type of scaling."""

    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Size | None = None
    """Old spellings. Their values are in `rope_parameters`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is None:
            self.head_dim = _head_size(self.hidden_size, self.num_attention_heads)
        if self.layer_types is not None:
            self.layer_types = _checked_layer_types(self.layer_types, self.num_hidden_layers)
        self.rope_parameters = self._complete_rope_parameters()

    def _complete_rope_parameters(self) -> dict[str, Any]:
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
    """Number of first layers with full attention, if `layer_types` is not given."""

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
    num_labels: Size = 2  # labels of a classifier. The length of `id2label` replaces it
    id2label: dict[str, Any] | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None
    """Old spelling of `sentence_transformers.activation_fn`: a torch.nn class, for scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _head_size(self.hidden_size, self.num_attention_heads)
        if self.id2label is not None:
            self.num_labels = len(self.id2label)

    @property
    def score_activation(self) -> str:
        """Name of the torch.nn class that is applied to scores."""
        name = (self.sentence_transformers or {}).get("activation_fn")
        name = name or self.sbert_ce_default_activation_function or "Sigmoid"
        return str(name).rpartition(".")[2]


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
}  # config classes by config.json's `model_type`


def parse_config(raw: dict[str, Any]) -> ArchitectureConfig:
    """Parse the content of a config.json.

    Raises ValueError for a value of the wrong type, a contradiction, or an unsupported feature."""
    kind = KINDS.get(str(raw.get("model_type")))
    if kind is None:
        raise ValueError(
            f"unsupported model_type {raw.get('model_type')!r}; supported: {', '.join(KINDS)}"
        )
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from None


def _head_size(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads


def _checked_layer_types(layer_types: list[str], num_layers: int) -> list[str]:
    """Check the layer types. Replaces the old name for full attention."""
    layer_types = ["full_attention" if kind == "attention" else kind for kind in layer_types]
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"unsupported layer_types: {', '.join(unknown)}")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return layer_types
