"""Steps of few next tokens on a CPU: layers are run once, and their kernels' calls replayed.

A step of one request is short, so that what Python takes between its hundred kernels shows: 0.8 ms of 20 ms of gpt2 in fp32, of 8 ms in
int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from toolkit.attention import AttentionBatch
from toolkit.kernels import cpu
from toolkit.kernels.cpu.program import Program, Recorder, UnrecordableError

MOST_TOKENS = 32
Layers = Callable[[torch.Tensor, AttentionBatch], torch.Tensor]
"""From hidden states [num_tokens, hidden] to others; `x` may be changed."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A program, the tensors that it reads, and the one that it writes."""

    program: Program
    x: torch.Tensor
    batch: AttentionBatch
    out: torch.Tensor

    def run(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        for own, given in ((self.x, x), *zip(_changing(self.batch), _changing(batch), strict=True)):
            own.copy_(given)
        self.program.run()
        return self.out.clone()


class Replay:
    """Runs layers over a step, replaying those of another one of as many next tokens; where it cannot, it calls them.

    Everything else that layers read (weights, the cache) stays where it is as long as the step's block table does.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._recorded: dict[tuple[int, int], _Recorded | None] = {}
        """By number of tokens and place of the block table; None: what cannot be recorded."""

    def __call__(self, layers: Layers, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        if not self._serves(x, batch):
            return layers(x, batch)
        key = len(x), batch.block_table.data_ptr()
        if key not in self._recorded:
            self._recorded[key] = self._record(layers, x, batch)
        recorded = self._recorded[key]
        return layers(x, batch) if recorded is None else recorded.run(x, batch)

    @staticmethod
    def _serves(x: torch.Tensor, batch: AttentionBatch) -> bool:
        """Whether it is a step of few requests, a token of each."""
        return (
            x.device.type == "cpu"
            and cpu.available()
            and len(x) == len(batch.seq_lens) <= MOST_TOKENS
            and batch.wanted is None
        )

    def _record(self, layers: Layers, x: torch.Tensor, batch: AttentionBatch) -> _Recorded | None:
        own_x = x.clone()
        positions, slot_mapping, seq_lens, rows = (tensor.clone() for tensor in _changing(batch))
        own = AttentionBatch(
            positions=positions,
            slot_mapping=slot_mapping,
            query_start_loc=batch.query_start_loc.clone(),
            seq_lens=seq_lens,
            rows=rows,
            block_table=batch.block_table,
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
        )
        try:
            program, out = self._recorder.record(lambda: layers(own_x, own))
        except UnrecordableError:
            return None
        return _Recorded(program, own_x, own, out)


def _changing(batch: AttentionBatch) -> tuple[torch.Tensor, ...]:
    return batch.positions, batch.slot_mapping, batch.seq_lens, batch.rows
