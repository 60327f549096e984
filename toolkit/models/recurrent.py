"""Layers that keep a state for each request, rather than keys and values of each token."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from toolkit.attention import AttentionBatch
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import Span
from toolkit.kernels.table import TritonKernels, kernels_for
from toolkit.layers import Linear, MergedLinear
from toolkit.models.memory import RowMemory
from toolkit.models.mix import Mix
from toolkit.models.model import Keeper
from toolkit.weights.quantization import target_device

if TYPE_CHECKING:
    from toolkit.kernels.triton.recurrent.step import RecurrentStep
    from toolkit.weights.weight import Rows

GPULayer = Callable[[torch.Tensor, "RecurrentStep"], torch.Tensor]
CPULayer = Callable[[torch.Tensor, recurrent.RecurrentStep], torch.Tensor]


class RecurrentMix(Mix, Keeper):
    """A layer with a state. All that it computes between its two products is one operation.

    A subclass defines the operation in PyTorch, and names the kernels that compute it."""

    input: MergedLinear
    output: Linear
    memory: RowMemory

    def __init__(self) -> None:
        super().__init__()
        kernels = kernels_for(target_device())
        self._gpu = kernels if isinstance(kernels, TritonKernels) else None
        self.may_synchronize = self._gpu is None
        self.states: tuple[torch.Tensor, ...] = ()  # as `shape_states` returns them
        self._layer: Callable[[torch.Tensor, AttentionBatch], torch.Tensor]

    @abc.abstractmethod
    def shape_states(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of the memory's parts, [num_slots, heads, size], as kernels take them."""

    @abc.abstractmethod
    def compute(self, y: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """Return the input of `output`, from the output of `input`. The definition."""

    @abc.abstractmethod
    def gpu_layer(self, kernels: TritonKernels) -> GPULayer:
        """Return a GPU's kernels for `compute`."""

    @abc.abstractmethod
    def cpu_layer(self) -> CPULayer:
        """Return a CPU's kernel for `compute`."""

    def bind(self, *tensors: torch.Tensor) -> None:
        self.states = self.shape_states(*tensors)
        self._choose()

    def pack(self) -> None:
        """Read the weights. Called once, after loading."""
        if self.states:
            self._choose()

    def _choose(self) -> None:
        """Choose what computes the layer, before weights are loaded and again after."""
        if (kernels := self._gpu) is not None:
            on_gpu = self.gpu_layer(kernels)
            self._layer = lambda y, batch: on_gpu(y, _gpu_step(batch, kernels))
        elif recurrent.supports(*self.states):
            on_cpu = self.cpu_layer()
            self._layer = lambda y, batch: on_cpu(y, _cpu_step(batch))
        else:
            self._layer = lambda y, batch: self.compute(y, _spans(batch))

    def forward(self, x: Rows, batch: AttentionBatch) -> torch.Tensor:
        """Return the input of `output`."""
        return self._layer(self.input(x), batch)


def _spans(batch: AttentionBatch) -> list[Span]:
    """Return a step's requests, as definitions take them."""
    if "recurrent" not in batch.plan:
        states = batch.states
        assert states is not None
        firsts, lengths = batch.query_start_loc, batch.seq_lens
        starts = lengths - (firsts[1:] - firsts[:-1])
        begins = starts if states.begins is None else states.begins
        written = lengths if states.written is None else states.written
        columns = (firsts[:-1], starts, lengths, begins, written, *states.tensors)
        rows = torch.stack([one.int() for one in columns], 1).tolist()
        batch.plan["recurrent"] = [Span(*row) for row in rows if row[1] < row[2]]
    found: list[Span] = batch.plan["recurrent"]
    return found


def _gpu_step(batch: AttentionBatch, kernels: TritonKernels) -> RecurrentStep:
    """Return a step's requests, as GPU kernels take them."""
    if "recurrent" not in batch.plan:
        states = batch.states
        assert states is not None
        batch.plan["recurrent"] = kernels.recurrent_step(
            batch.query_start_loc,
            batch.seq_lens,
            len(batch.positions),
            batch.max_query_len,
            states.most_verified,
            *states.tensors,
            states.begins,
            states.written,
        )
    found: RecurrentStep = batch.plan["recurrent"]
    return found


def _cpu_step(batch: AttentionBatch) -> recurrent.RecurrentStep:
    """Return a step's requests, as CPU kernels take them."""
    if "recurrent" not in batch.plan:
        states = batch.states
        assert states is not None
        batch.plan["recurrent"] = recurrent.RecurrentStep(
            batch.query_start_loc,
            batch.seq_lens,
            *states.tensors,
            states.begins,
            states.written,
        )
    found: recurrent.RecurrentStep = batch.plan["recurrent"]
    return found
