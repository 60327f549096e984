"""Descriptions of decoders. Imports no torch.

A decoder is an embedding, layers, a norm and a head. A layer is a tuple of steps; a step is one or
more branches that read the same residual stream and are added to it together. The builder, the
weight loader, `tk show`, `--dry-run` and the layout of the cache read the same description."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Literal, Protocol, Self

from toolkit.errors import CheckpointError
from toolkit.kernels.gates import Gate
from toolkit.models.memory import Memory, Part, RowMemory, TokenMemory
from toolkit.weights.activation import activation_kind, gate_kind
from toolkit.weights.source import Source

ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "proportional": (),
}
"""Parameters that a type of rotation needs, besides `rope_theta`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, or a layer norm if it is centered."""

    name: str | None  # of its tensors; None: it has no parameters
    size: int
    eps: float
    is_centered: bool = False
    has_bias: bool = False
    offset: float = 0.0  # added to the stored weight, as in 1 + w; the sum is kept in fp32
    factor: float = 1.0  # of the stored weight; the product is kept in fp32
    is_bare: bool = False  # the weight has `name` alone

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Yield (name, shape, is in fp32) of its tensors."""
        if self.name is not None:
            is_float32 = self.offset != 0.0 or self.factor != 1.0
            parts = ("weight", "bias") if self.has_bias else ("weight",)
            for part in parts:
                name = self.name if self.is_bare else f"{self.name}.{part}"
                yield name, (self.size,), is_float32


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm of queries and keys (QK norm)."""

    q: str | None
    """Name of the query norm's tensors, with `{}` for the head if each has its own. None: no norm
    has parameters."""
    k: str | None  # None: it has no parameters, or the layer has queries alone
    eps: float
    span: Literal["head", "own", "all"] = "head"
    """head: one weight for all heads; own: one for each head; all: one norm over all heads."""
    is_centered: bool = False
    offset: float = 0.0
    is_last: bool = False  # after the rotation
    order: tuple[int, ...] | None = None  # of the weight's entries for a head; None: as they are
    norms_values: bool = False  # values, too, without a weight


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries at position p are scaled by 1 + beta · log(1 + ⌊(p + offset) / length⌋)."""

    beta: float
    length: int  # tokens
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation of queries and keys by their positions (RoPE)."""

    parameters: dict[str, Any]  # of config.json: rope_type, rope_theta, ...
    head_size: int
    max_positions: int
    query_scaling: QueryScaling | None = None

    @property
    def trained_len(self) -> int:
        """Context length before it was extended."""
        return int(self.parameters.get("original_max_position_embeddings") or self.max_positions)

    @property
    def longest(self) -> int:
        """Longest sequence in tokens. Dynamic scaling is given for `factor` trained lengths."""
        if self.parameters.get("rope_type") != "dynamic":
            return self.max_positions
        return max(self.max_positions, int(self.parameters["factor"] * self.trained_len))

    @property
    def rotates(self) -> bool:
        """False if all angles are 0."""
        return self.parameters.get("partial_rotary_factor") != 0.0

    @classmethod
    def unrotated(cls, head_size: int, max_positions: int, scaling: QueryScaling) -> Self:
        """Return a rotation by no angle, which only scales the queries."""
        parameters = {"rope_type": "proportional", "partial_rotary_factor": 0.0, "rope_theta": 1.0}
        return cls(parameters, head_size, max_positions, scaling)

    def __post_init__(self) -> None:
        kind = self.parameters.get("rope_type", "default")
        if kind not in ROPE_PARAMETERS:
            listed = ", ".join(ROPE_PARAMETERS)
            raise CheckpointError(f"Unsupported rope_type {kind!r}. Supported: {listed}.")
        for name in ROPE_PARAMETERS[kind]:
            if name not in self.parameters:
                raise CheckpointError(
                    f"The model's rope_parameters of type {kind!r} lack {name!r}."
                )
        for name in ("factor", "original_max_position_embeddings"):
            value = self.parameters.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value)):
                raise CheckpointError(
                    f"The model's rope_parameters of type {kind!r} cannot be used: {name} is "
                    f"{value!r}, not a number."
                )


class Mix:
    """The computation of a branch, between its norm and the residual stream.

    `models.mix.MODULES` has the module of each kind, or `module` names it."""

    __slots__ = ()
    module: ClassVar[str] = ""
    """The class of its module, "package.module:class", if another package has it. It is imported
    when the model is built: a description imports no torch."""
    weights: ClassVar[Literal["linear", "expert"]] = "linear"  # of the projections

    @property
    def memory(self) -> Memory | None:
        """Memory that it keeps between steps."""
        return None

    @property
    def reads(self) -> int | None:
        """Index of the layer whose memory it reads, if it has none of its own."""
        return None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return ()

    @property
    def parts(self) -> tuple[Mix, ...]:
        """Mixes whose tensors it has: itself, and one that it shares."""
        return (self,)

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        """Yield (source, rows, columns, has a bias) of each weight that may be quantized."""
        yield from ()

    def plain(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Yield (name, shape, is in fp32) of each other tensor."""
        yield from ()

    def idle(self, hidden: int) -> int:
        """Return the number of parameters that a token does not use."""
        return 0


@dataclass(frozen=True, slots=True)
class Attention(Mix):
    """Causal self-attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    q: Source
    k: Source | None  # None: `shares` is given
    v: Source | None
    out: Source
    scale: float
    bias: bool = False  # of queries, keys, values and gate
    out_bias: bool = False
    rope: Rope | None = None
    norm: HeadNorm | None = None
    window: int = 0  # tokens, with the query itself; 0: no window
    chunk: int = 0  # tokens; a query at position p sees keys from ⌊p / chunk⌋ · chunk on; 0: all
    soft_cap: float = 0.0  # of scores: cap · tanh(score / cap); 0: none
    clip: float = 0.0  # queries, keys and values are clamped to ±clip; 0: not
    sinks: str | None = None
    """Name of a tensor with a logit for each head, which joins the softmax (arXiv:2309.17453)."""
    gate: Source | None = None
    """A projection as wide as the queries, whose sigmoid multiplies the output."""

    shares: int | None = None
    """Index of the layer whose keys and values it attends to (arXiv:2405.12981). It has queries
    alone."""

    @property
    def memory(self) -> TokenMemory | None:
        if self.shares is not None:
            return None
        return TokenMemory.of_keys(self.num_kv_heads, self.head_size, self.window, self.chunk)

    @property
    def reads(self) -> int | None:
        return self.shares

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return () if self.rope is None else (self.rope,)

    def plain(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        if self.sinks is not None:
            yield self.sinks, (self.num_heads,), True
        if self.norm is not None:
            pairs = (self.norm.q, self.num_heads), (self.norm.k, self.num_kv_heads)
            for name, heads in pairs:
                if name is None:
                    continue
                tensors = head_norm_tensors(name, self.norm.span, heads, self.head_size)
                yield from ((one, shape, bool(self.norm.offset)) for one, shape in tensors)

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        kv = self.num_kv_heads * self.head_size
        for source, rows in zip((self.q, self.k, self.v), (self.width, kv, kv), strict=True):
            if source is not None:
                yield source, rows, hidden, self.bias and source.has_bias
        if self.gate is not None:
            yield self.gate, self.width, hidden, self.bias
        yield self.out, hidden, self.width, self.out_bias

    @property
    def width(self) -> int:
        """Number of features of all queries."""
        return self.num_heads * self.head_size


@dataclass(frozen=True, slots=True)
class CrossAttention(Mix):
    """Attention to the rows that the decoder's encoder has computed of a feature.

    Keys and values are products of these rows, computed once for each feature."""

    module: ClassVar[str] = "toolkit.models.cross_attention:CrossAttentionMix"
    num_heads: int
    head_size: int
    q: Source
    k: Source
    v: Source
    out: Source
    scale: float
    feature: int  # rows of a feature
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False

    @property
    def memory(self) -> TokenMemory:
        return TokenMemory.of_keys(self.num_heads, self.head_size, feature=self.feature)

    @property
    def width(self) -> int:
        """Number of features of all heads."""
        return self.num_heads * self.head_size

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        for source in (self.q, self.k, self.v):
            yield source, self.width, hidden, self.bias and source.has_bias
        yield self.out, hidden, self.width, self.out_bias


@dataclass(frozen=True, slots=True)
class DeltaNet(Mix):
    """A gated delta net (Yang et al., 2024, arXiv:2412.06464) after a short convolution.

    Each head of queries and keys is shared by consecutive heads of values. The output is normed for
    each head of values, and multiplied by silu(z)."""

    module: ClassVar[str] = "toolkit.models.delta_net:DeltaNetMix"
    num_k_heads: int
    num_v_heads: int
    k_size: int
    v_size: int
    width: int  # tokens of the convolution
    q: Source
    k: Source
    v: Source
    z: Source
    b: Source  # rate · its sigmoid says how much of what a key stood for is replaced
    a: Source  # the decay is -exp(A) · softplus(a + time)
    out: Source
    decay: str  # name of the tensor A
    time: str  # name of the tensor added to a
    convolutions: tuple[str, ...]  # names: of all channels, or of those of q, k and v
    norm: str  # name of its tensors
    eps: float
    rate: float = 1.0

    @property
    def group(self) -> int:
        """Heads of values for each of keys."""
        return self.num_v_heads // self.num_k_heads

    @property
    def keys(self) -> int:
        """Number of features of all keys."""
        return self.num_k_heads * self.k_size

    @property
    def values(self) -> int:
        return self.num_v_heads * self.v_size

    @property
    def memory(self) -> RowMemory:
        inputs = 2 * self.k_size + self.group * (self.v_size + 2)  # of a head of keys
        return RowMemory(
            (
                Part(self.num_k_heads, inputs, last_tokens=self.width),
                Part(self.num_v_heads, self.k_size * self.v_size, in_float32=True),
            ),
            takes_drafts=True,
        )

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        rows = self.keys, self.keys, self.values, self.values, self.num_v_heads, self.num_v_heads
        sources = self.q, self.k, self.v, self.z, self.b, self.a
        for source, number in zip(sources, rows, strict=True):
            yield source, number, hidden, False
        yield self.out, hidden, self.values, False

    def plain(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        counts = [self.keys, self.keys, self.values]
        if len(self.convolutions) == 1:
            counts = [sum(counts)]
        for name, count in zip(self.convolutions, counts, strict=True):
            yield f"{name}.weight", (count, 1, self.width), False
        yield self.decay, (self.num_v_heads,), True
        yield self.time, (self.num_v_heads,), True
        yield f"{self.norm}.weight", (self.v_size,), False


@dataclass(frozen=True, slots=True)
class ShortConvolution(Mix):
    """out(c · convolution(b · x)), a causal convolution of each channel (LFM2)."""

    module: ClassVar[str] = "toolkit.models.short_convolution:ShortConvolutionMix"
    size: int  # channels
    width: int  # tokens of the convolution
    b: Source
    c: Source
    x: Source
    out: Source
    convolution: str  # name of its tensors
    bias: bool = False  # of all products and of the convolution

    @property
    def memory(self) -> RowMemory:
        return RowMemory((Part(self.size, 1, last_tokens=self.width),), takes_drafts=True)

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        for source in (self.b, self.c, self.x):
            yield source, self.size, hidden, self.bias
        yield self.out, hidden, self.size, self.bias

    def plain(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        yield f"{self.convolution}.weight", (self.size, 1, self.width), False
        if self.bias:
            yield f"{self.convolution}.bias", (self.size,), False


@dataclass(frozen=True, slots=True)
class MLP(Mix):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x))."""

    size: int  # number of features between up and down
    activation: str  # by its name in config.json
    up: Source
    down: Source
    gate: Source | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        activation_kind(self.activation)  # refuses an unknown name

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        for source in (self.up,) if self.gate is None else (self.gate, self.up):
            yield source, self.size, hidden, self.bias
        yield self.down, hidden, self.size, self.bias


@dataclass(frozen=True, slots=True)
class Correction:
    """A number for each expert, added to its score for the choice only (arXiv:2412.19437)."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # in the checkpoint


@dataclass(frozen=True, slots=True)
class Experts(Mix):
    """A weighted sum of gated MLPs, a few of which are chosen for each token.

    The router's logits become scores; the experts with the highest are chosen. With groups of
    adjacent experts, the groups are chosen first (DeepSeek-V2, arXiv:2405.04434)."""

    weights: ClassVar[Literal["linear", "expert"]] = "expert"
    num_experts: int
    num_chosen: int  # for each token
    size: int  # number of features between up and down of each
    activation: Gate  # by its name in config.json, or another function of gate and up
    router: Source
    gate: Source  # names have `{}` for the index of the expert, or all experts are one tensor
    up: Source
    down: Source
    bias: bool = False  # of the router and of each projection
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalizes: bool = False  # the chosen scores are divided by their sum
    scale: float = 1.0  # of the weights
    weighs_inputs: bool = False  # weights multiply the experts' inputs, not their outputs
    num_groups: int = 1
    num_chosen_groups: int = 1
    correction: Correction | None = None
    routes_in_float32: bool = False  # the router's product, too
    factors: str | None = None
    """Name of a tensor with a number for each expert, which multiplies its weight."""
    shared: MLP | None = None  # computed for every token
    shared_gate: Source | None = None  # its sigmoid is the weight of `shared`; None: 1

    def __post_init__(self) -> None:
        gate_kind(self.activation)  # refuses an unknown name
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ValueError(f"{self.num_chosen} of {self.num_experts} experts cannot be chosen")

    @property
    def parts(self) -> tuple[Mix, ...]:
        return (self,) if self.shared is None else (self, self.shared)

    def expert(self, index: int) -> tuple[Source, Source, Source]:
        """Return gate, up and down of an expert."""
        gate, up, down = (self._entry(one, index) for one in (self.gate, self.up, self.down))
        return gate, up, down

    def _entry(self, source: Source, index: int) -> Source:
        if "{}" in source.name:
            return replace(source, name=source.name.format(index))
        return replace(source, stack=(index, self.num_experts))

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        for index in range(self.num_experts):
            gate, up, down = self.expert(index)
            yield gate, self.size, hidden, self.bias
            yield up, self.size, hidden, self.bias
            yield down, hidden, self.size, self.bias

    def plain(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        shape = self.num_experts, hidden
        yield f"{self.router.name}.weight", shape, self.routes_in_float32
        if self.bias:
            yield f"{self.router.name}.bias", shape[:1], self.routes_in_float32
        if self.correction is not None:
            yield self.correction.name, self.correction.shape, True
        if self.shared_gate is not None:
            yield f"{self.shared_gate.name}.weight", (1, hidden), False
        if self.factors is not None:
            yield self.factors, (self.num_experts,), True

    def idle(self, hidden: int) -> int:
        return (self.num_experts - self.num_chosen) * 3 * self.size * hidden


@dataclass(frozen=True, slots=True)
class ExpertsAndMLP(Mix):
    """The sum of an MLP and of experts, each between norms of its own. It reads the residual."""

    module: ClassVar[str] = "toolkit.models.experts_and_mlp:ExpertsAndMLPMix"
    mlp: MLP
    experts: Experts
    mlp_norms: tuple[Norm, Norm]  # of what it reads, and of its product
    experts_norms: tuple[Norm, Norm]
    router_norm: Norm  # of what the router reads

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (*self.mlp_norms, *self.experts_norms, self.router_norm)

    @property
    def parts(self) -> tuple[Mix, ...]:
        return (self, self.mlp, *self.experts.parts)

    def plain(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        for norm in self.norms:
            yield from norm.tensors()

    def idle(self, hidden: int) -> int:
        return self.experts.idle(hidden)


@dataclass(frozen=True, slots=True)
class LayerInput(Mix):
    """out(activation(gate(x)) · input), with the layer's part of `LayerInputs`."""

    module: ClassVar[str] = "toolkit.models.layer_inputs:LayerInputMix"
    layer: int = field(repr=False)  # index
    size: int
    activation: str  # by its name in config.json
    gate: Source
    out: Source

    def projections(self, hidden: int) -> Iterator[tuple[Source, int, int, bool]]:
        yield self.gate, self.size, hidden, False
        yield self.out, hidden, self.size, False


@dataclass(frozen=True, slots=True)
class Branch:
    """scale · post(mix(norm(residual)))."""

    mix: Mix
    norm: Norm | None  # None: it reads the residual stream as it is
    post: Norm | None = None
    scale: float = 1.0
    factor: str | None = None
    """Name of a tensor with one number, which multiplies the residual stream after the step."""


Step = tuple[Branch, ...]  # branches that are added to the residual stream together
Layer = tuple[Step, ...]


def mixes_of(layers: Iterable[Layer]) -> Iterator[Mix]:
    """Yield what the branches of layers compute, in order."""
    return (branch.mix for layer in layers for step in layer for branch in step)


def memory_of(layers: Iterable[Layer]) -> list[Memory]:
    """Return the memory of layers, in order."""
    return [mix.memory for mix in mixes_of(layers) if mix.memory is not None]


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table."""

    name: str
    size: int
    first: int = 0  # row of the first entry
    is_bare: bool = (
        False  # the tensor has `name` alone, and a dimension of size 1 before the others
    )


@dataclass(frozen=True, slots=True)
class Head:
    """The projection to logits: soft_cap(scale · (W x + b))."""

    bias: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["embedding", "table", "positions", "head", "linear", "expert", "vector"]
    layer: int | None = None
    is_float32: bool = False  # kept in fp32 whatever the type of the model
    is_transposed: bool = False  # the last dimensions are [in, out]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Number of inputs of a product."""
        return self.shape[-2 if self.is_transposed else -1]


@dataclass(frozen=True, slots=True)
class Encoder:
    """A text encoder, whose model is a class of its own."""

    model: str  # "module:class"
    max_positions: int  # tokens
    is_scorer: bool  # it scores pairs of texts, or classifies texts
    memory: tuple[Memory, ...] = ()
    num_layers: int = 0  # with memory

    @property
    def longest(self) -> int:
        return self.max_positions


@dataclass(frozen=True, slots=True)
class External:
    """A decoder that Transformers computes, whose model is a class of its own."""

    model: str  # "module:class"
    max_positions: int  # tokens; 0: config.json does not say
    memory: tuple[Memory, ...] = ()  # as config.json suggests, for estimates

    @property
    def num_layers(self) -> int:
        return len(self.memory)

    @property
    def longest(self) -> int:
        return self.max_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer:
    """A layer after the last that guesses tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    It reads a product of the norms of a token's embedding and of the hidden state before it. The
    output head is the model's."""

    name: str  # of its tensors
    layer: Layer
    embed_norm: Norm
    hidden_norm: Norm
    product: Source
    norm: Norm  # before the head
    unread: tuple[str, ...]  # copies of the model's tensors, after `name`
    others: tuple[str, ...] = ()  # beginnings of the names of tensors of further layers
    embed: str | None = None  # name of its embedding table; None: it reads the model's
    passes_norm: bool = False
    """The next draft reads the output of `norm`. False: it reads the residual stream before it."""

    def parameters(self, hidden: int, vocab_size: int) -> Iterator[Parameter]:
        """Return the tensors of a checkpoint, each once."""
        return _unique(self._parameters(hidden, vocab_size))

    def _parameters(self, hidden: int, vocab_size: int) -> Iterator[Parameter]:
        if self.embed is not None:
            yield Parameter(f"{self.embed}.weight", (vocab_size, hidden), "embedding")
        yield Parameter(self.product.tensor("weight"), (hidden, 2 * hidden), "linear")
        for norm in (self.embed_norm, self.hidden_norm, self.norm):
            yield from _norm_parameters(norm, None)
        for branch in chain.from_iterable(self.layer):
            yield from _branch_parameters(branch, hidden, 0)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Numbers of a token for each layer (per-layer embeddings of Gemma 3n and 4).

    scale · (norm(product(embedding)) + factor · table[token]), with a norm for each layer."""

    size: int  # for each layer
    table: Table
    product: Source
    norm: Norm
    factor: float
    scale: float

    def parameters(self, num_layers: int, hidden: int) -> Iterator[Parameter]:
        width = num_layers * self.size
        yield Parameter(f"{self.table.name}.weight", (self.table.size, width), "table")
        yield Parameter(self.product.tensor("weight"), (width, hidden), "linear")
        yield from _norm_parameters(self.norm, None)


class FeatureEncoder(Protocol):
    """An encoder of features, whose weights are in the decoder's checkpoint."""

    module: ClassVar[str]  # the class of its module, "package.module:class"

    def parameters(self) -> Iterator[Parameter]:
        """Yield the tensors of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder with causal attention."""

    vocab_size: int
    hidden_size: int
    max_positions: int  # tokens; default for --max-model-len
    embed: str  # name of the embedding table
    layers: Sequence[Layer]
    layers_name: str  # name of the layers in the checkpoint, before their index
    norm: Norm
    head: Head = field(default_factory=Head)
    is_tied: bool = False  # the head's weight is the embedding table
    embed_scale: float = 1.0
    positions: Table | None = None  # learned positions, added to the embedding
    unused: tuple[str, ...] = ()  # substrings of checkpoint tensor names to ignore
    draft_layer: DraftLayer | None = None
    axes: tuple[int, ...] = ()
    """Axis of each rotated pair, for tokens with several positions; empty: they have one."""

    layer_inputs: LayerInputs | None = None
    encoder: FeatureEncoder | None = None
    """Encoder of the feature that each prompt has, such as a clip. None: prompts have none."""
    sound: FeatureEncoder | None = None
    """Tower for clips whose rows stand for tokens. None: prompts have no such tokens."""

    @property
    def longest(self) -> int:
        """Maximum of --max-model-len, in tokens."""
        return max(self.max_positions, *(rope.longest for rope in self.ropes), 0)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixes(self) -> list[Mix]:
        return list(mixes_of(self.layers))

    @property
    def memory(self) -> list[Memory]:
        return memory_of(self.layers)

    @property
    def num_sharing(self) -> int:
        """Number of last layers that share memory, and the one before them that has it; or 1."""
        read = [mix.reads for mix in self.mixes if mix.reads is not None]
        return self.num_layers - min(read, default=self.num_layers - 1)

    @property
    def ropes(self) -> list[Rope]:
        return [rope for mix in self.mixes for rope in mix.ropes]

    def layer_size(self, index: int) -> int:
        """Return the number of parameters of a layer's products."""
        parts = chain.from_iterable(mix.parts for mix in mixes_of([self.layers[index]]))
        products = chain.from_iterable(part.projections(self.hidden_size) for part in parts)
        return sum(rows * columns for _, rows, columns, _ in products)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(part, Experts) for mix in self.mixes for part in mix.parts)

    def parameters(self) -> Iterator[Parameter]:
        """Return the tensors of a checkpoint, each once."""
        return _unique(self._parameters())

    def _parameters(self) -> Iterator[Parameter]:
        hidden = self.hidden_size
        yield Parameter(f"{self.embed}.weight", (self.vocab_size, hidden), "embedding")
        if self.positions is not None:
            shape = self.positions.size, hidden
            yield Parameter(f"{self.positions.name}.weight", shape, "positions")
        if self.layer_inputs is not None:
            yield from self.layer_inputs.parameters(self.num_layers, hidden)
        for encoder in (self.encoder, self.sound):
            if encoder is not None:
                yield from encoder.parameters()
        for index, layer in enumerate(self.layers):
            for branch in chain.from_iterable(layer):
                yield from _branch_parameters(branch, hidden, index)
        yield from _norm_parameters(self.norm, None)
        if not self.is_tied:
            yield Parameter("lm_head.weight", (self.vocab_size, hidden), "head")
        if self.head.bias:
            yield Parameter("lm_head.bias", (self.vocab_size,), "vector")


def _unique(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the first parameter of each name: several projections may be in one tensor."""
    seen = set()
    for one in parameters:
        if one.name not in seen:
            seen.add(one.name)
            yield one


def _branch_parameters(branch: Branch, hidden: int, index: int) -> Iterator[Parameter]:
    yield from _norm_parameters(branch.norm, index)
    yield from _norm_parameters(branch.post, index)
    if branch.factor is not None:
        yield Parameter(branch.factor, (1,), "vector", index)
    for mix in branch.mix.parts:
        for source, rows, columns, has_bias in mix.projections(hidden):
            total = rows if source.order is None else source.order.total
            stack = () if source.stack is None else source.stack[1:]
            sizes = (columns, total) if source.transpose else (total, columns)
            yield Parameter(
                source.tensor("weight"),
                (*stack, *sizes),
                mix.weights,
                index,
                is_transposed=source.transpose,
            )
            if has_bias:
                yield Parameter(source.tensor("bias"), (*stack, total), "vector", index)
        for name, shape, is_float32 in mix.plain(hidden):
            yield Parameter(name, shape, "vector", index, is_float32)


def head_norm_tensors(
    name: str, span: str, num_heads: int, head_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the tensors of a QK norm."""
    if span == "own" and "{}" in name:
        yield from ((f"{name.format(head)}.weight", (head_size,)) for head in range(num_heads))
    elif span == "own":
        yield f"{name}.weight", (num_heads, head_size)
    else:
        yield f"{name}.weight", (head_size if span == "head" else num_heads * head_size,)


def _norm_parameters(norm: Norm | None, layer: int | None) -> Iterator[Parameter]:
    for name, shape, is_float32 in () if norm is None else norm.tensors():
        yield Parameter(name, shape, "vector", layer, is_float32)
