"""Gated short convolutions (LFM2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from toolkit.attention import AttentionBatch
from toolkit.distributed import current_group, even_shard
from toolkit.kernels.cpu import recurrent
from toolkit.kernels.recurrent import short_convolution
from toolkit.kernels.table import TritonKernels, kernels_for
from toolkit.layers import Linear, MergedLinear
from toolkit.models import describe
from toolkit.models.delta_net import cpu_step_of, gpu_step_of, sequences_of
from toolkit.models.memory import RowMemory
from toolkit.models.mix import Mix
from toolkit.models.model import Keeper
from toolkit.weights.quantization import target_device
from toolkit.weights.slots import Slot, Slots
from toolkit.weights.weight import parameter

if TYPE_CHECKING:
    from toolkit.kernels.triton.products.matmul import Unscaled


class ShortConvolutionMix(Mix, Keeper):
    """A convolution between two gates. The gates and its input are one product."""

    input: MergedLinear
    output: Linear
    attends = True

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
        kernels = kernels_for(target_device())
        self._gpu = kernels if isinstance(kernels, TritonKernels) else None
        self.may_synchronize = self._gpu is None

        self.windows: torch.Tensor | None = None
        self._is_loaded = False
        self._layer: Callable[[torch.Tensor, AttentionBatch], torch.Tensor] = self._compute

    def bind(self, *tensors: torch.Tensor) -> None:
        """`tensors`: windows, [num_slots, channels, width - 1]."""
        (windows,) = tensors
        self.windows = windows.view(len(windows), self.net.width - 1, -1)
        self._prepare()

    def pack(self) -> None:
        """Prepare the kernels, if there are any. Called once, after loading."""
        self._is_loaded = True
        self._prepare()

    def _prepare(self) -> None:
        """Make the kernels once weights and windows are there."""
        if not self._is_loaded or (windows := self.windows) is None:
            return
        weights = self.kernel, self.bias
        if (kernels := self._gpu) is not None:
            self._layer = lambda y, batch: kernels.gated_convolution(
                y, *weights, windows, gpu_step_of(batch, kernels)
            )
        elif recurrent.supports(windows):
            on_cpu = recurrent.GatedConvolution(*weights, windows)
            self._layer = lambda y, batch: on_cpu(y, cpu_step_of(batch))

    def forward(self, x: torch.Tensor | Unscaled, batch: AttentionBatch) -> torch.Tensor:
        """Return the input of `output`, [num_tokens, channels]."""
        return self._layer(self.input(x), batch)

    def _compute(self, y: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Compute all but the products in PyTorch. y: [num_tokens, b | c | x]."""
        assert self.windows is not None
        b, c, inner = y.chunk(3, dim=1)
        out = short_convolution(
            b * inner, self.kernel, self.windows, sequences_of(batch), self.bias, has_silu=False
        )
        return c * out

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.net.width, *super().kind)

    def slots(self) -> Slots:
        shards, name = (self._channels,), self.net.convolution
        slots: Slots = {f"{name}.weight": Slot(self.kernel[:, None], shards=shards)}
        if self.bias is not None:
            slots[f"{name}.bias"] = Slot(self.bias, shards=shards)
        return slots
