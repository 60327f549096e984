"""The interface of attention backends, and the choice among them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import reference
from toolkit.kernels.reference import HeadNorm


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Embeddings of tokens that stand for features."""

    index: torch.Tensor  # [num_tokens] int32, each token's row of the table; -1: none
    table: torch.Tensor
    """[num_rows, hidden · (1 + levels)]: embeddings, and what first layers add to the residual."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Slots of the states of a step's requests, int32 [num_reqs] each.

    A state that is written has no drafts: their inputs wait in its slot, until a step begins after
    those that were accepted, and adds them. Snapshots are written in addition to the states, if the
    step passes their numbers of tokens."""

    reads: torch.Tensor  # slot of the state before the step; see `AttentionBatch.is_first`
    writes: torch.Tensor  # slot of the state after it
    keeps: torch.Tensor  # slot of a snapshot; negative: none
    kept: torch.Tensor  # number of tokens in the snapshot
    spare: int  # slot of no request
    begins: torch.Tensor | None = None
    """Number of tokens in the state that is read. None: all before the step."""
    written: torch.Tensor | None = None
    """Number of tokens in the state that is written. None: all, with the step's."""
    most_verified: int = 1
    """Tokens of a request that verifies drafts. With more, it computes a prompt."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots of states and snapshots, and the snapshots' numbers of tokens."""
        return self.reads, self.writes, self.keeps, self.kept


class GroupTable(NamedTuple):
    """Places of a step's tokens in the caches of a group of layers. On the device."""

    blocks: torch.Tensor  # [num_rows, max_blocks] int32, each row contiguous
    slots: torch.Tensor  # [num_tokens] int64, cache slot of each token; negative: none


@dataclass(slots=True)
class AttentionBatch:
    """A step's tokens and requests. Tokens are packed, request after request.

    Tensors are on the device and int32 unless noted."""

    positions: torch.Tensor  # [num_tokens]
    tables: tuple[GroupTable, ...]  # where the tokens of each group of layers are
    query_start_loc: torch.Tensor  # [num_reqs + 1]
    seq_lens: torch.Tensor  # [num_reqs], with this step's tokens
    rows: torch.Tensor  # [num_reqs], each request's row in `tables`
    max_query_len: int  # an upper bound, like `max_seq_len`
    max_seq_len: int
    live: torch.Tensor | None = None
    """[num_tokens] int64, negative for tokens that pad a captured step. None: none does."""
    wanted: torch.Tensor | None = None
    """Tokens whose last hidden states are needed, int64. None: all.

    The last layer skips the others after attention."""
    when_kept: Callable[[], None] | None = None
    """Is called when only the `wanted` tokens are left: products that follow have no others."""
    last_key: torch.Tensor | None = None
    """[num_tokens], position of the last key that each token sees; None: its own.

    It is no earlier than its own, nor than that of the request's token before it, and in the cache
    after this step. Without prompts (`verifies`, `max_query_len` 1) each token's is its own."""
    states: StateRows | None = None  # None: the model has no memory of rows
    verifies: bool = False
    """Requests have their newest token and drafts, up to `max_query_len` in all, and no prompt."""
    is_adapted: bool = False  # some requests have LoRA adapters
    order: torch.Tensor | None = None  # [num_reqs], requests by descending context length
    rope_positions: torch.Tensor | None = None
    """[num_tokens] or [3, num_tokens], positions for the rotation. None: `positions`."""
    features: FeatureRows | None = None  # in a step that may have tokens of features
    rope: tuple[torch.Tensor, ...] = ()
    """Cosines and sines of each token, [num_tokens, 2, rotary_size / 2], by kind of rotation.

    The model gathers them before its first layer. NOTE: on a GPU at least three kernels lie between
    the gathering and the first attention: attention reads them before the kernel ahead of it ends
    (see `toolkit.kernels.triton.pdl`)."""
    layer_inputs: torch.Tensor | None = None
    """[num_tokens, num_layers · size], numbers that layers read of each token (`LayerInputs`)."""
    feature: AttentionBatch | None = None
    """The step as layers see it whose tokens read a feature of their request (`of_feature`)."""
    plan: dict[Hashable, Any] = field(default_factory=dict)  # computed once, for all layers

    @property
    def is_first(self) -> torch.Tensor:
        """True for requests whose first token is in this step, [num_reqs], on the device.

        Their states begin with zeros, whatever is in the slot that they read."""
        lengths = self.query_start_loc[1:] - self.query_start_loc[:-1]
        return self.seq_lens <= lengths

    def of_feature(self, num_tokens: int) -> AttentionBatch:
        """Return the batch of tokens that see all tokens of a feature, in a group's blocks."""
        sees_all = torch.full_like(self.positions, num_tokens - 1)
        return replace(
            self,
            seq_lens=torch.where(self.seq_lens > 0, num_tokens, 0).int(),
            max_seq_len=num_tokens,
            last_key=None if self.max_query_len == 1 else sees_all,
            verifies=False,
            feature=None,
            plan={},
        )

    def of_wanted(self) -> AttentionBatch:
        """Return the batch of the wanted tokens alone, each as a request of one token.

        For layers that only read the cache, which has all tokens of the step."""
        assert self.wanted is not None
        wanted, last = self.wanted, len(self.seq_lens) - 1
        requests = torch.searchsorted(self.query_start_loc, wanted.int(), right=True) - 1
        positions = self.positions[wanted]
        ends = positions if self.last_key is None else self.last_key[wanted]
        return replace(
            self,
            positions=positions,
            tables=tuple(GroupTable(one.blocks, one.slots[wanted]) for one in self.tables),
            query_start_loc=torch.arange(
                len(wanted) + 1, dtype=torch.int32, device=positions.device
            ),
            seq_lens=ends + 1,
            rows=self.rows[requests.clamp_(max=last)],
            max_query_len=1,
            live=None if self.live is None else self.live[wanted],
            wanted=None,
            last_key=None,
            states=None,
            verifies=False,
            order=None,
            features=None,
            rope=tuple(table[wanted] for table in self.rope),
            layer_inputs=None if self.layer_inputs is None else self.layer_inputs[wanted],
            plan={},
        )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int = 0  # tokens, with the query itself; 0: no window
    chunk: int = 0  # tokens; see `describe.Attention.chunk`
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """A logit per head that joins the softmax and has no value, fp32 [num_heads]."""


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Transform of the heads between the QKV projection and attention.

    `reference.qk_norm_rope_write` defines it."""

    rope: int | None = None  # index into `AttentionBatch.rope`; None: no rotation
    q_rope: int | None = None  # the queries' index (Ministral 3 scales them); None: `rope`
    norm: HeadNorm | None = None
    clip: float = 0.0  # queries, keys and values are first clamped to ±clip (OLMo); 0: not

    def arguments(self, batch: AttentionBatch) -> dict[str, Any]:
        """Return keyword arguments of `reference.qk_norm_rope_write` for a step."""
        return {
            "cos_sin": None if self.rope is None else batch.rope[self.rope],
            "q_cos_sin": None if self.q_rope is None else batch.rope[self.q_rope],
            "norm": self.norm,
            "clip": self.clip,
        }


class AttentionLayer(Protocol):
    """Parts of an attention layer (`toolkit.attention.Attention`) that backends read."""

    shape: AttentionShape
    transform: HeadTransform

    @property
    def k_cache(self) -> torch.Tensor: ...

    @property
    def v_cache(self) -> torch.Tensor: ...

    @property
    def group(self) -> int:
        """Index into `AttentionBatch.tables`."""


class AttentionBackend(abc.ABC):
    """Writes keys and values into the cache and attends over it.

    Caches: [num_blocks, block_size, num_kv_heads, head_size], of the queries' type or FP8 (e4m3).
    Blocks are contiguous, and may be apart: other layers' may lie between them.
    FP8 keys and values are rounded to nearest and clamped; products keep the queries' precision."""

    name: ClassVar[str]
    is_capturable: ClassVar[bool] = False
    """True if its CUDA graphs can be replayed with other lengths."""
    supports_fp8: ClassVar[bool] = True  # for the caches
    takes_slices: ClassVar[bool] = False  # of wider rows, as queries, keys and values

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abc.abstractmethod
    def unsupported_reason(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        """Return why it cannot run there, or None if it can."""

    def forward(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Call `write`, then `attend`."""
        return self.attend(layer, self.write(layer, qkv, batch), batch)

    def read(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Call `turn`, then `attend`."""
        return self.attend(layer, self.turn(layer, query, batch), batch)

    @abc.abstractmethod
    def write(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Transform the heads and cache keys and values. Return the queries.

        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_size].
        Returns [num_tokens, num_heads, head_size]."""

    def store(self, layer: AttentionLayer, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Cache keys and values alone, as they are.

        kv: [n, 2 · num_kv_heads · head_size]; slots: int64 [n], in the cache; negative: none."""
        reference.qk_norm_rope_write(
            kv,
            slots,
            layer.k_cache,
            layer.v_cache,
            num_heads=0,
            num_kv_heads=layer.shape.num_kv_heads,
        )

    @abc.abstractmethod
    def turn(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Transform the heads of a layer that has queries alone.

        query: [num_tokens, num_heads · head_size]. Returns [num_tokens, num_heads, head_size]."""

    @abc.abstractmethod
    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Return attention over the requests' cached tokens: causal, or up to `last_key`.

        query, and the result: [num_tokens, num_heads, head_size]."""


BACKENDS = {
    "triton": "toolkit.attention.triton:TritonBackend",
    "flash": "toolkit.attention.flash:FlashBackend",
    "cpu": "toolkit.attention.cpu:CPUBackend",
    "torch": "toolkit.attention.torch:TorchBackend",
}  # backends in order of preference


def choose_backend(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    block_size: int,
    *,
    fp8_cache: bool = False,
) -> tuple[AttentionBackend, str]:
    """Return (backend, why it was chosen). Raises ConfigError if `requested` cannot run."""
    reasons: list[str] = []
    for name in BACKENDS if requested == "auto" else [requested]:
        module, _, attribute = BACKENDS[name].partition(":")
        backend: type[AttentionBackend] = getattr(import_module(module), attribute)
        problem = backend.unsupported_reason(device, dtype, head_size, block_size)
        if fp8_cache and not backend.supports_fp8:
            problem = "does not support --kv-cache-dtype fp8"
        if problem is None:
            why = "requested" if requested != "auto" else f"the first that fits {device.type}"
            return backend(device), "; ".join([why, *reasons])
        reasons.append(f"{name}: {problem}")
    raise ConfigError(
        f"The attention backend {requested} cannot run here: {'; '.join(reasons)}.",
        param="attention_backend",
    )


class Backends:
    """The backend of each layer, chosen by the size of its heads."""

    def __init__(
        self,
        requested: str,
        device: torch.device,
        dtype: torch.dtype,
        head_sizes: Iterable[int],
        block_size: int,
        *,
        fp8_cache: bool = False,
    ) -> None:
        """Raises ConfigError if `requested` cannot run for one of the sizes."""
        chosen = {
            size: choose_backend(requested, device, dtype, size, block_size, fp8_cache=fp8_cache)
            for size in dict.fromkeys(head_sizes)
        }
        self._of_size = {size: backend for size, (backend, _) in chosen.items()}
        found = {backend.name: f"{backend.name} ({why})" for backend, why in chosen.values()}
        self.name, self.why = ", ".join(found), "; ".join(found.values())

    def of(self, head_size: int) -> AttentionBackend:
        return self._of_size[head_size]

    @property
    def is_capturable(self) -> bool:
        """True if CUDA graphs of all layers can be replayed with other lengths."""
        return all(backend.is_capturable for backend in self._of_size.values())
