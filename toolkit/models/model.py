"""The interfaces of models."""

import abc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from toolkit.attention import (
    Attention,
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    HeadTransform,
)
from toolkit.attention.packed import PackedBatch
from toolkit.distributed import SINGLE_STAGE, Stage
from toolkit.layers import Linear, OutputHead
from toolkit.models.memory import Memory, TokenMemory
from toolkit.weights.kinds.grouped import GroupedWeight
from toolkit.weights.slots import JoinedSlot, Slot, Slots, joined_slot
from toolkit.weights.weight import Stored


class Keeper(abc.ABC):
    """A module that keeps something between steps: attention has keys and values."""

    memory: Memory  # on this rank
    backend: AttentionBackend  # of a memory of tokens; set before the first step
    group: int = 0  # of its memory of tokens, in the step's tables

    @abc.abstractmethod
    def bind(self, *tensors: torch.Tensor) -> None:
        """Get a tensor for each part of the memory, before the first step."""


@runtime_checkable
class _Packable(Protocol):
    def pack(self) -> None: ...


@runtime_checkable
class _Loadable(Protocol):
    def slots(self) -> Slots: ...


class WeightModule(nn.Module):
    """A module with weights of a checkpoint.

    Its parameters are uninitialized, on the default device and in the default dtype."""

    unused: tuple[str, ...] = ()  # substrings of checkpoint tensor names to ignore

    def slots(self) -> Slots:
        """Return the destination of each tensor of a checkpoint."""
        slots: dict[str, list[Slot | JoinedSlot]] = {}
        for module in self.modules():
            if module is not self and isinstance(module, _Loadable):
                for name, slot in module.slots().items():
                    slots.setdefault(name, []).append(slot)
        return {name: joined_slot(parts) for name, parts in slots.items()}

    def pack_weights(self) -> None:
        """Convert the weights to the layout that is fastest on a CPU."""
        # A list, because the iterator refers to weights, which are replaced.
        for module in [module for module in self.modules() if isinstance(module, _Packable)]:
            module.pack()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, packed or not."""
        return sum(
            module.nbytes
            if isinstance(module, Stored)
            else sum(p.nbytes for p in module.parameters(recurse=False))
            for module in self.modules()
        )

    def expandable(self) -> list[GroupedWeight]:
        """Return the weights of integers of layers' products.

        Not those of experts, which have kernels of their own, and of the head, which has a row for
        each request alone."""
        linears = [
            module
            for module in self.modules()
            if isinstance(module, Linear) and not isinstance(module, OutputHead)
        ]
        parts = {part: None for linear in linears for part in linear.weight.modules()}
        return [part for part in parts if isinstance(part, GroupedWeight)]


class Model(WeightModule, abc.ABC):
    """A transformer over packed tokens."""

    vocab_size: int
    hidden_size: int
    dtype: torch.dtype  # of the activations
    architecture: str  # its name in config.json
    may_synchronize: bool = False  # a step may wait for the device

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.dtype = torch.get_default_dtype()

    def keepers(self) -> list[Keeper]:
        """Return the modules with memory, in order."""
        return [module for module in self.modules() if isinstance(module, Keeper)]

    @property
    def memory(self) -> list[Memory]:
        """Memory of this rank's layers."""
        return [keeper.memory for keeper in self.keepers()]

    @property
    def query_size(self) -> int:
        """Query heads times head size, summed over this rank's attention layers."""
        shapes = [one.shape for one in self.keepers() if isinstance(one, PagedAttention)]
        return sum(shape.num_heads * shape.head_size for shape in shapes)

    def with_few_layers(self) -> AbstractContextManager[None]:
        """Run as few layers inside the block as launch the kernels of all."""
        return nullcontext()


class Encoder(Model):
    """A model with bidirectional attention. It has no KV cache and runs complete prompts."""

    @abc.abstractmethod
    def forward(self, token_ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden states [num_tokens, hidden] of token_ids [num_tokens]."""


class Scorer(Encoder):
    """A classifier of texts, or a cross-encoder: it scores pairs of texts."""

    @abc.abstractmethod
    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of the prompts' first tokens [n, hidden] to scores [n, labels]."""


class CausalLM(Model):
    """A decoder, with causal attention."""

    lm_head: OutputHead  # on the last stage; may share the embedding's weight
    stage: Stage = SINGLE_STAGE

    @abc.abstractmethod
    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run this stage.

        token_ids: [num_tokens]. hidden: [num_tokens, hidden], the previous stage's output. On the
        last stage returns the normalized last hidden states [num_tokens, hidden], or only those of
        `batch.wanted`; on other stages the next stage's `hidden`."""

    def logits(self, hidden: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Map [n, hidden] to logits [n, vocab_size]. On a GPU they are written to `buffer`."""
        logits: torch.Tensor = self.lm_head(hidden, buffer)
        return logits

    def disable_recording(self) -> None:
        """Call the layers in every step, instead of replaying recorded calls."""

    @property
    def why_unrecorded(self) -> str | None:
        """Return why no step of a CPU has been recorded, None if one has."""
        return "the model's own code computes it"


class PagedAttention(Attention, Keeper):
    """Attention whose keys and values lie in blocks."""

    def __init__(self, shape: AttentionShape, transform: HeadTransform | None = None) -> None:
        super().__init__(shape, transform or HeadTransform())
        self.memory = TokenMemory.of_keys(
            shape.num_kv_heads, shape.head_size, shape.sliding_window, shape.chunk
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors inside in this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
