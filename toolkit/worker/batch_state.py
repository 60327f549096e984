"""Running requests on the device, one stable row each."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch
from toolkit.sampling.processor_rows import NO_PROCESSORS, Loaded
from toolkit.sampling.sampling_state import SamplingState
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.speculative.drafter import NO_DRAFT
from toolkit.worker.sample_points import SamplePoints

IntArray = npt.NDArray[np.integer[Any]]


class BatchState:
    """Row r belongs to one request from its admission to its end or preemption.

    `token_ids` [num_rows, max_model_len + 1] int32: prompt and output. The device writes sampled
    tokens, so that the next step can read them before the host has seen them. `block_table`
    [num_rows, max_blocks] int32."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        processors: Loaded = NO_PROCESSORS,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.token_ids = torch.zeros(num_rows, max_model_len + 1, dtype=torch.int32, device=device)
        max_blocks = -(-max_model_len // block_size)
        self.block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling = SamplingState(num_rows, device, processors)
        self.lengths = np.zeros(num_rows, np.int32)
        """Number of tokens of each row, prompt and output, without drafts."""
        self.num_drafts = np.zeros(num_rows, np.int32)
        """Number of drafts after each row's tokens. A step that was planned before they were known
        may have points for more; what is there was left by earlier steps."""
        self.adapters = np.zeros(num_rows, np.int32)
        """Slot of each row's LoRA adapter."""
        self.capacity = np.zeros(num_rows, np.int32)
        """Number of tokens that each row's blocks hold."""
        self._spare_blocks: torch.Tensor | None = None

    def set_spare_blocks(self, first: int, per_row: int) -> None:
        """Give each row `per_row` blocks, from `first` on, for positions past its own blocks.

        A drafter writes there: the scheduler adds blocks for the tokens of the next step only."""
        num_rows, max_blocks = self.block_table.shape
        nth = torch.arange(max_blocks) % per_row
        blocks = first + torch.arange(num_rows)[:, None] * per_row + nth
        self._spare_blocks = blocks.to(self.device, torch.int32)

    def apply(self, step: SchedulerOutput) -> None:
        """Apply a step's new rows, new blocks, and tokens sampled elsewhere."""
        for new in step.new_rows:
            self._place(new)
        if len(step.new_blocks):
            row, index, block = torch.from_numpy(step.new_blocks).to(self.device).unbind(1)
            self.block_table[row, index] = block
            # Of equal rows, the last counts.
            self.capacity[step.new_blocks[:, 0]] = (step.new_blocks[:, 1] + 1) * self.block_size
        if len(step.known_tokens):
            row, position, token = step.known_tokens.T
            self.put(row, position, torch.from_numpy(token))
            ends = step.num_computed + step.num_tokens
            ends[step.samples] -= step.num_sampled - 1
            self.lengths[step.rows[step.samples]] = ends[step.samples]

    def _place(self, new: NewRow) -> None:
        tokens = torch.tensor(new.token_ids, dtype=torch.int32)
        self.token_ids[new.row, : len(tokens)] = tokens
        if self._spare_blocks is not None:
            self.block_table[new.row] = self._spare_blocks[new.row]
        self.block_table[new.row, : len(new.blocks)] = torch.tensor(new.blocks, dtype=torch.int32)
        self.capacity[new.row] = len(new.blocks) * self.block_size
        self.sampling.set(new.row, new.spec, new.seed)
        self.sampling.load([new.row])
        self.lengths[new.row], self.num_drafts[new.row] = len(tokens), 0
        self.adapters[new.row] = new.adapter

    def inputs(self, step: SchedulerOutput) -> tuple[torch.Tensor, AttentionBatch]:
        """Return a step's token ids [num_tokens] and attention batch."""
        token_ids, batch = self.batch(step.rows, step.num_tokens, self.context_lens(step))
        batch.is_adapted = bool(self.adapters[step.rows].any())
        return token_ids, batch

    def batch(
        self,
        rows: npt.NDArray[np.int32],
        num_tokens: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        ahead: int = 0,
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """Return the token ids and the attention batch of the last tokens of some rows' contexts.

        Arrays are parallel. `ahead`: the ids are those of the tokens so many positions later."""
        counts = num_tokens.astype(np.int64)
        ends = counts.cumsum()
        request = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(int(ends[-1])) - (ends - context_lens)[request]
        own = rows[request]

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        blocks = self._take(self.block_table, own, positions // self.block_size)
        position = on_device(positions)
        batch = AttentionBatch(
            positions=position,
            slot_mapping=blocks * self.block_size + position % self.block_size,
            query_start_loc=on_device(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=on_device(context_lens),
            rows=on_device(rows),
            block_table=self.block_table,
            max_query_len=int(num_tokens.max()),
            max_seq_len=int(context_lens.max()),
            query_lens=num_tokens,
            context_lens=context_lens,
        )
        return self._take(self.token_ids, own, positions + ahead), batch

    def context_lens(self, step: SchedulerOutput) -> npt.NDArray[np.int32]:
        """Return the number of tokens of each request after the step, with its drafts."""
        ends = self.lengths[step.rows]
        if len(step.num_drafts):
            ends += step.num_drafts
        return np.where(step.samples, ends, step.num_computed + step.num_tokens)

    def put(self, rows: IntArray, positions: IntArray, tokens: torch.Tensor) -> None:
        """Write tokens [n], sampled ones or drafts; negative ones as token 0."""
        if self.device.type == "cpu":
            self.token_ids.numpy()[rows, positions] = tokens.clamp(min=0).numpy()
            return
        place = torch.from_numpy(np.stack((rows, positions))).to(self.device, torch.int64)
        self.token_ids[place[0], place[1]] = tokens.clamp(min=0).to(self.device, torch.int32)

    def commit(self, points: SamplePoints, tokens: torch.Tensor) -> npt.NDArray[np.int32] | None:
        """Write the tokens [num_points] that follow right drafts, and advance the lengths.

        Returns the number of each request's tokens, or None if it is one."""
        counts, kept = None, np.arange(len(points))
        if len(points) > len(points.which):
            drafts = self.token_ids.numpy()[points.rows, points.positions]
            nth = points.positions - self.lengths[points.rows]
            drafts = np.where(nth < self.num_drafts[points.rows], drafts, NO_DRAFT)
            counts, kept = points.accepted(tokens.numpy(), drafts)
            tokens = tokens[kept]
        rows, positions = points.rows[kept], points.positions[kept]
        self.put(rows, positions, tokens)
        self.lengths[rows] = positions + 1  # of equal rows, the last counts
        return counts

    def put_drafts(self, rows: IntArray, drafts: IntArray) -> None:
        """Write the rows' drafts [n, most], padded with -1, after their tokens."""
        positions = self.lengths[rows][:, None] + np.arange(drafts.shape[1])
        fits = (drafts >= 0) & (positions < self.token_ids.shape[1])
        self.num_drafts[rows] = np.count_nonzero(fits, axis=1)
        which, nth = np.nonzero(fits)
        self.put(rows[which], positions[which, nth], torch.from_numpy(drafts[which, nth]))

    def _take(self, table: torch.Tensor, rows: IntArray, columns: IntArray) -> torch.Tensor:
        """Return elements of a table, int64. For few, NumPy takes a third of PyTorch's time."""
        if self.device.type == "cpu":
            return torch.from_numpy(table.numpy()[rows, columns].astype(np.int64))
        row, column = (
            torch.from_numpy(index).to(self.device, torch.int64) for index in (rows, columns)
        )
        return table[row, column].to(torch.int64)
