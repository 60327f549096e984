"""Replay of a CPU's decode steps: the kernel calls of the layers are recorded once, then repeated.

A step of one request is short, so Python's time between its hundred kernels counts: 0.8 ms of 20 ms
for gpt2 in fp32, and of 8 ms in int8.

There is one recording for each number of requests. Layers that compute with more than kernels
(several ranks, another attention backend, a cache in FP8) cannot be recorded and are called."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from toolkit.attention import AttentionBatch, StateRows
from toolkit.kernels import cpu
from toolkit.kernels.cpu.program import Program, Recorder, UnrecordableError

MAX_TOKENS = 32
Layers = Callable[[torch.Tensor, AttentionBatch], torch.Tensor]
"""Maps hidden states [num_tokens, hidden] to hidden states. May change its input."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded program with its input and output tensors."""

    program: Program
    x: torch.Tensor
    batch: AttentionBatch
    out: torch.Tensor

    def run(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        inputs = zip(_inputs(self.batch), _inputs(batch), strict=True)
        for own, given in ((self.x, x), *inputs):
            own.copy_(given)
        self.program.run()
        return self.out.clone()


class Replay:
    """Runs the layers of a step by replaying a recording for their number of tokens, or calls them.

    Everything else that layers read (weights, the cache) stays in place as long as the block table
    does."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._recorded: dict[tuple[int, int, int, bool], _Recorded | None] = {}
        """By number of tokens, number of block tables (a drafter's steps differ) and address of the
        first, and whether some tokens have LoRA adapters: any. None: cannot be recorded."""

    def __call__(self, layers: Layers, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        if not self._is_decode(x, batch):
            return layers(x, batch)
        tables = batch.tables
        key = len(x), len(tables), tables[0].blocks.data_ptr(), batch.is_adapted
        if key not in self._recorded:
            self._recorded[key] = self._record(layers, x, batch)
        recorded = self._recorded[key]
        return layers(x, batch) if recorded is None else recorded.run(x, batch)

    @property
    def why_unrecorded(self) -> str | None:
        """Return why no step has been recorded, None if one has."""
        if any(self._recorded.values()):
            return None
        return (
            "its layers compute with more than the CPU kernels"
            if cpu.available()
            else cpu.problem()
        )

    @staticmethod
    def _is_decode(x: torch.Tensor, batch: AttentionBatch) -> bool:
        """Return True for a step of one token for each of a few requests."""
        return (
            cpu.available() and len(x) == len(batch.seq_lens) <= MAX_TOKENS and batch.wanted is None
        )

    def _record(self, layers: Layers, x: torch.Tensor, batch: AttentionBatch) -> _Recorded | None:
        own_x = x.clone()
        positions, seq_lens, rows, *others = (tensor.clone() for tensor in _inputs(batch))
        tables = tuple(one._replace(slots=others.pop(0)) for one in batch.tables)
        states = None
        if batch.states is not None:
            # The recorded calls run now, and again: no request's state may change twice.
            reads, writes, keeps, after = (others.pop(0) for _ in range(4))
            spare = batch.states.spare
            states = StateRows(reads.fill_(spare), writes.fill_(spare), keeps, after, spare)
            keeps.fill_(-1)
        layer_inputs = None if batch.layer_inputs is None else others.pop(0)
        own = AttentionBatch(
            positions=positions,
            tables=tables,
            query_start_loc=batch.query_start_loc.clone(),
            seq_lens=seq_lens,
            rows=rows,
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
            states=states,
            rope=tuple(others),
            layer_inputs=layer_inputs,
        )
        if batch.feature is not None:
            own.feature = own.of_feature(batch.feature.max_seq_len)
        try:
            program, out = self._recorder.record(lambda: layers(own_x, own))
        except UnrecordableError:
            return None
        return _Recorded(program, own_x, own, out)


def _inputs(batch: AttentionBatch) -> tuple[torch.Tensor, ...]:
    of_states = () if batch.states is None else batch.states.tensors
    of_layers = () if batch.layer_inputs is None else (batch.layer_inputs,)
    slots = (one.slots for one in batch.tables)
    of_requests = batch.positions, batch.seq_lens, batch.rows
    return *of_requests, *slots, *of_states, *of_layers, *batch.rope
