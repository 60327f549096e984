"""Parsed config.json: types are checked, old spellings accepted, and defaults are Transformers'.

Reading it without Transformers saves seconds at every start."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from toolkit.errors import ConfigError
from toolkit.kernels import cpu
from toolkit.models.describe import Decoder, Encoder, External, Rope
from toolkit.weights.formats import Packings
from toolkit.weights.layout import on_device

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class ArchitectureConfig(msgspec.Struct, kw_only=True):
    """Fields of every architecture."""

    overflows_float16: bool = False  # activations exceed its range. Not in the file
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Values of other fields of config.json that say what the model always computes."""

    architectures: list[str]
    model_type: str = ""
    dtype: str | None = None  # type that the weights were saved in, by PyTorch's name
    torch_dtype: str | None = None  # old spelling of `dtype`; read that
    vocab_size: Size
    tie_word_embeddings: bool = False
    is_wrapped: bool = False  # the checkpoint also has a tower. Not in the file
    sight: Any = None
    """`models.config.towers.Sight` of a model whose tower tk runs. Not in the file."""
    sound: Any = None
    """`models.config.sounds.Sound` of a model whose tower for clips tk runs. Not in the file."""
    packings: Any = None
    """`weights.formats.Packings` of a quantized checkpoint. Not in the file."""

    reads_shapes: ClassVar[bool] = False  # `read_shapes` is to be called

    def __post_init__(self) -> None:
        self.dtype = self.dtype or self.torch_dtype

    def read_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Note the layout of a checkpoint's tensors, which config.json does not say."""


def resolve_dtype(wanted: str, config: ArchitectureConfig, *, on_gpu: bool) -> str:
    """Return the type of weights and activations for --dtype `wanted`.

    auto is, on a GPU, float16 for a float16 checkpoint, else bfloat16; on a CPU, bfloat16 for a
    bfloat16 checkpoint if our kernels are available, else float32. There float16 would lose
    precision as bfloat16, and has no fast products.

    Raises ConfigError for float16 if the model's activations exceed its range. auto avoids it."""
    if wanted == "float16" and config.overflows_float16:
        raise ConfigError(
            f"--dtype float16: activations of {config.architectures[0]} exceed its range. Use "
            f"--dtype bfloat16.",
            param="dtype",
        )
    if wanted != "auto":
        return wanted
    if on_gpu:
        keeps = config.dtype == "float16" and not config.overflows_float16
        return "float16" if keeps else "bfloat16"
    return "bfloat16" if config.dtype == "bfloat16" and cpu.available() else "float32"


def name_weights(
    described: Decoder | Encoder | External,
    packings: Packings | None,
    dtype: str,
    quantization: str | None,
    *,
    on_gpu: bool,
) -> str:
    """Return the type of most weights of products in memory, such as `int4 (GPTQ)`."""
    if quantization is not None or packings is None or not isinstance(described, Decoder):
        return quantization or dtype
    sizes: Counter[str] = Counter()
    for one in described.parameters():
        if one.kind in ("linear", "expert"):
            packing, is_expert = (
                packings.find(one.name.removesuffix(".weight")),
                one.kind == "expert",
            )
            layout = packing and on_device(packing.layout, on_gpu=on_gpu, is_expert=is_expert)
            sizes[layout.type if layout else ""] += one.size
    [(found, _)] = sizes.most_common(1)
    if not found:
        return dtype
    return found if found == packings.method else f"{found} ({packings.title})"


class DecoderConfig(ArchitectureConfig, kw_only=True):
    """Fields of decoders with Llama's names."""

    default_theta: ClassVar[float] = 10000.0  # for configs without rope_theta

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
    rope_parameters: dict[str, Any] | None = None
    """`rope_type`, `rope_theta` and the parameters of that type of scaling; or these for each
    layer type."""

    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Size | None = None
    """Old spellings. Their values are in `rope_parameters`."""

    is_causal: bool | None = None
    use_bidirectional_attention: bool | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, is_causal=(None, True), use_bidirectional_attention=(None, False))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is None:
            self.head_dim = head_size(self.hidden_size, self.num_attention_heads)
        given = dict(self.rope_scaling or self.rope_parameters or {})
        if any(isinstance(value, dict) for value in given.values()):
            self.rope_parameters = {kind: self._completed(own or {}) for kind, own in given.items()}
        else:
            self.rope_parameters = self._completed(given)

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        parameters = dict(given)
        parameters.setdefault("rope_theta", self.rope_theta or self.default_theta)
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

    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens. YaRN extends the length that it names."""
        assert self.rope_parameters is not None
        rope = self.rope_parameters.get("full_attention", self.rope_parameters)
        factor, length = rope.get("factor"), rope.get("original_max_position_embeddings")
        if rope["rope_type"] != "yarn" or not isinstance(factor, int | float):
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(factor * length))

    def rope(self, layer_type: str = "full_attention", **options: Any) -> Rope:
        """Describe the rotation of layers of a type. `options`: other fields of `Rope`."""
        assert self.rope_parameters is not None
        assert self.head_dim is not None
        parameters = self.rope_parameters.get(layer_type, self.rope_parameters)
        return Rope(parameters, self.head_dim, self.max_position_embeddings, **options)


class WindowedConfig(DecoderConfig, kw_only=True):
    """Fields of decoders whose layers may have a sliding window."""

    sliding_window: int | None = None  # tokens
    layer_types: list[str] | None = None
    """`full_attention` or `sliding_attention` for each layer. None: all the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None:
            self.layer_types = checked_layer_types(self.layer_types, self.num_hidden_layers)

    def window(self, index: int) -> int:
        """Return the window of a layer in tokens; 0: none."""
        is_full = self.layer_types is not None and self.layer_types[index] == "full_attention"
        return 0 if is_full else self.sliding_window or 0


def head_size(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads


def checked_layer_types(
    layer_types: list[str], num_layers: int, other: str = "sliding_attention"
) -> list[str]:
    """Check the layer types: full attention and `other`. Replaces the old name for the former."""
    layer_types = ["full_attention" if kind == "attention" else kind for kind in layer_types]
    unknown = sorted(set(layer_types) - {"full_attention", other})
    if unknown:
        raise ValueError(f"unsupported layer_types: {', '.join(unknown)}")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return layer_types


def require(config: ArchitectureConfig, **accepted: tuple[object, ...]) -> None:
    """Raise ValueError if a field does not have one of its accepted values."""
    for name, values in accepted.items():
        value = getattr(config, name)
        if value not in values:
            listed = " or ".join(map(json.dumps, values))
            raise ValueError(f"{name} is {json.dumps(value)}, and tk supports {listed}")
