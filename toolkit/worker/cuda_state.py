"""Batch state on a GPU: the host sends little, without waiting, and kernels expand it."""

from dataclasses import dataclass

import numpy as np
import torch

from toolkit.attention import AttentionBatch
from toolkit.kernels.table import Kernels
from toolkit.lora.gpu_weight import GPUActive, StepAdapters
from toolkit.sampling.processor_rows import NO_PROCESSORS, Loaded
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.scheduler.output import IntArray
from toolkit.worker.batch_state import BatchState
from toolkit.worker.graph_policy import StepShape
from toolkit.worker.staging import Staging


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device.

    `sample_positions` [num_reqs] int32: position of each request's next token; -1: none is sampled.
    """

    token_ids: torch.Tensor
    batch: AttentionBatch
    sample_positions: torch.Tensor
    adapters: StepAdapters | None  # in a step with LoRA adapters


class CudaBatchState(BatchState):
    """The state, and input buffers with fixed addresses, so that CUDA graphs can read them.

    One extra row belongs to the padding: requests without tokens, and tokens without a slot."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        max_tokens: int,
        kernels: Kernels,
        processors: Loaded = NO_PROCESSORS,
        active: GPUActive | None = None,
    ) -> None:
        """active: LoRA adapters, if there are any."""
        super().__init__(num_rows + 1, max_model_len, block_size, device, processors)
        self._copy_runs, self._expand = kernels.copy_runs, kernels.expand_inputs
        self._staging = Staging(device)
        self._num_reqs, self.max_tokens = num_rows, max_tokens
        self.active = active
        sizes = [num_rows, num_rows + 1, num_rows, num_rows, num_rows]
        if active is not None:
            # Kernels are compiled for adapters' buffers that begin at 16 bytes.
            sizes += [-sum(sizes) % 4, -(-num_rows // 4) * 4, 2 + active.num_slots]
        self._ends = np.cumsum(sizes)
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        split = torch.split(self._packed, sizes)
        self._rows, self._query_start_loc, self._seq_lens, self._sample_positions, self._order = (
            split[:5]
        )
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self._adapters: StepAdapters | None = None
        if active is not None:
            tokens = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
            self._adapters = StepAdapters(used=split[7], tokens=tokens, requests=split[6])

    def apply(self, step: SchedulerOutput) -> None:
        if step.new_rows:
            self._place_all(step.new_rows)
        if len(step.new_blocks):
            row, index, block = step.new_blocks.T
            self._put(self.block_table, row, index, block)
        if len(step.known_tokens):
            row, position, token = step.known_tokens.T
            self._put(self.token_ids, row, position, token)

    def _put(
        self, table: torch.Tensor, rows: IntArray, columns: IntArray, values: IntArray
    ) -> None:
        """Set single numbers of a table."""
        order = np.arange(len(rows), dtype=np.int32)
        runs = np.stack((rows, columns, order, np.ones_like(order)), axis=1)
        runs_there, values_there = self._staging.send([runs, values])
        self._copy_runs(table, runs_there.view(-1, 4), values_there, 1)

    def _place_all(self, new: list[NewRow]) -> None:
        sampling = self.sampling
        for one in new:
            sampling.set(one.row, one.spec, one.seed)
            self.adapters[one.row] = one.adapter
        rows = np.array([one.row for one in new], np.int32)
        token_runs, tokens = _runs(rows, [one.token_ids for one in new])
        block_runs, blocks = _runs(rows, [one.blocks for one in new])
        which, ints, floats, runs, tokens_there, block_runs_there, blocks_there = (
            self._staging.send(
                [
                    # Twice, so that the 64-bit numbers after them are aligned.
                    np.concatenate((rows, rows)),
                    sampling.host_ints[rows].view(np.int32),
                    sampling.host_floats[rows].view(np.int32),
                    token_runs,
                    tokens,
                    block_runs,
                    blocks,
                ]
            )
        )
        which = which[: len(rows)].to(torch.int64)
        sampling.ints.index_copy_(0, which, ints.view(torch.int64).view(-1, 3))
        sampling.floats.index_copy_(0, which, floats.view(torch.float32).view(-1, 6))
        self._copy_runs(self.token_ids, runs.view(-1, 4), tokens_there, int(token_runs[:, 3].max()))
        self._copy_runs(
            self.block_table,
            block_runs_there.view(-1, 4),
            blocks_there,
            int(block_runs[:, 3].max()),
        )

    def send(self, step: SchedulerOutput) -> None:
        """Send a step's numbers to the device, padded to all requests."""
        n, size = len(step.rows), self._num_reqs
        packed = np.empty(self._ends[-1], np.int32)
        rows, starts, lens, samples, order, *adapters = np.split(packed, self._ends[:-1])
        rows[:n], rows[n:] = step.rows, size
        starts[0] = 0
        np.cumsum(step.num_tokens, out=starts[1 : n + 1])
        starts[n + 1 :] = starts[n]
        np.add(step.num_computed, step.num_tokens, out=lens[:n])
        lens[n:] = 0
        samples[:n] = np.where(step.samples, lens[:n], -1)
        samples[n:] = -1
        order[:n] = np.argsort(-lens[:n])
        order[n:] = np.arange(n, size)
        if self.active is not None:
            _, index, used = adapters
            self.active.pack(self.adapters[step.rows], index, used)
        self._staging.send_into(self._packed, [packed])

    def expand(self, shape: StepShape) -> StepInputs:
        """Return the inputs of the step that was sent last."""
        n, tokens = shape.num_reqs, shape.num_tokens
        rows, starts, lens = self._rows[:n], self._query_start_loc[: n + 1], self._seq_lens[:n]
        out = (self._token_ids[:tokens], self._positions[:tokens], self._slots[:tokens])
        adapters = None
        if shape.is_adapted:
            assert self._adapters is not None
            adapters = StepAdapters(
                self._adapters.used, self._adapters.tokens[:tokens], self._adapters.requests[:n]
            )
        self._expand(
            rows,
            starts,
            lens,
            self.token_ids,
            self.block_table,
            self.block_size,
            out,
            None if adapters is None else (adapters.requests, adapters.tokens),
        )
        batch = AttentionBatch(
            positions=out[1],
            slot_mapping=out[2],
            query_start_loc=starts,
            seq_lens=lens,
            rows=rows,
            block_table=self.block_table,
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            order=self._order[:n],
        )
        return StepInputs(out[0], batch, self._sample_positions[:n], adapters)


def _runs(rows: np.ndarray, lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (runs [n, 4], values) that copy each list to the start of its row."""
    lengths = np.array([len(one) for one in lists], np.int32)
    begins = np.concatenate(([0], lengths.cumsum()[:-1])).astype(np.int32)
    values = np.concatenate([np.array(one, np.int32) for one in lists])
    return np.stack((rows, np.zeros_like(rows), begins, lengths), axis=1), values
