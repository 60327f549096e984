"""Gated short convolutions (LFM2)."""

import torch

from toolkit.distributed import current_group, even_shard
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import Span, gated_convolution
from toolkit.kernels.table import TritonKernels
from toolkit.layers import Linear, MergedLinear
from toolkit.models import describe
from toolkit.models.memory import RowMemory
from toolkit.models.recurrent import CPULayer, GPULayer, RecurrentMix
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.weight import parameter


class ShortConvolutionMix(RecurrentMix):
    """A convolution between two gates. The gates and its input are one product."""

    def __init__(self, net: describe.ShortConvolution, hidden: int, _: object) -> None:
        super().__init__()
        self.net, self._channels = net, even_shard(net.size, "channels of a convolution")
        shards, sources = [self._channels] * 3, (net.b, net.c, net.x)
        self.input = MergedLinear(hidden, shards, sources, bias=net.bias)
        self.output = Linear(net.size, hidden, net.out, bias=net.bias, split="in")
        ranks, count = current_group().size, self._channels.count
        self.memory = RowMemory(tuple(part.on_rank(ranks) for part in net.memory.parts))
        self.kernel = parameter(torch.zeros(count, net.width))
        self.bias = parameter(torch.zeros(count)) if net.bias else None

    def shape_states(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the last inputs, [num_slots, rows, channels]."""
        (inputs,) = tensors
        return (inputs.view(len(inputs), -1, len(self.kernel)),)

    def gpu_layer(self, kernels: TritonKernels) -> GPULayer:
        return kernels.gated_convolution(self.kernel, self.bias, *self.states)

    def cpu_layer(self) -> CPULayer:
        return recurrent.GatedConvolution(self.kernel, self.bias, *self.states)

    def compute(self, y: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """Return [num_tokens, channels]. y: [num_tokens, b | c | x]."""
        (inputs,) = self.states
        return gated_convolution(y, self.kernel, self.bias, inputs, spans)

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.net.width, *super().kind)

    def slots(self) -> Slots:
        shards, name = (self._channels,), self.net.convolution
        slots: Slots = {f"{name}.weight": Slot(self.kernel[:, None], shards=shards)}
        if self.bias is not None:
            slots[f"{name}.bias"] = Slot(self.bias, shards=shards)
        return slots
