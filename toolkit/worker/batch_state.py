"""Running requests on the device, one stable row each."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch
from toolkit.sampling.processor_rows import NO_PROCESSORS, Loaded
from toolkit.sampling.sampling_state import SamplingState
from toolkit.scheduler import NewRow, SchedulerOutput

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
        self.adapters = np.zeros(num_rows, np.int32)
        """Slot of each row's LoRA adapter."""

    def apply(self, step: SchedulerOutput) -> None:
        """Apply a step's new rows, new blocks, and tokens sampled elsewhere."""
        for new in step.new_rows:
            self._place(new)
        if len(step.new_blocks):
            row, index, block = torch.from_numpy(step.new_blocks).to(self.device).unbind(1)
            self.block_table[row, index] = block
        if len(step.last_tokens):
            ends = (step.num_computed + step.num_tokens)[step.samples]
            self.append(step.rows[step.samples], ends - 1, torch.from_numpy(step.last_tokens))

    def _place(self, new: NewRow) -> None:
        tokens = torch.tensor(new.token_ids, dtype=torch.int32)
        self.token_ids[new.row, : len(tokens)] = tokens
        self.block_table[new.row, : len(new.blocks)] = torch.tensor(new.blocks, dtype=torch.int32)
        self.sampling.set(new.row, new.spec, new.seed)
        self.sampling.load([new.row])
        self.adapters[new.row] = new.adapter

    def inputs(self, step: SchedulerOutput) -> tuple[torch.Tensor, AttentionBatch]:
        """Return a step's token ids [num_tokens] and attention batch."""
        counts = step.num_tokens.astype(np.int64)
        ends = counts.cumsum()
        request = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(int(ends[-1])) - (ends - counts - step.num_computed)[request]
        rows = step.rows[request]
        context_lens = step.num_computed + step.num_tokens

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        blocks = self._take(self.block_table, rows, positions // self.block_size)
        position = on_device(positions)
        batch = AttentionBatch(
            positions=position,
            slot_mapping=blocks * self.block_size + position % self.block_size,
            query_start_loc=on_device(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=on_device(context_lens),
            rows=on_device(step.rows),
            block_table=self.block_table,
            max_query_len=int(step.num_tokens.max()),
            max_seq_len=int(context_lens.max()),
            query_lens=step.num_tokens,
            context_lens=context_lens,
            is_adapted=bool(self.adapters[step.rows].any()),
        )
        return self._take(self.token_ids, rows, positions), batch

    def append(self, rows: IntArray, lengths: IntArray, tokens: torch.Tensor) -> None:
        """Write sampled tokens [n] at the positions `lengths` of rows; negative ones as token 0."""
        if self.device.type == "cpu":
            self.token_ids.numpy()[rows, lengths] = tokens.clamp(min=0).numpy()
            return
        place = torch.from_numpy(np.stack((rows, lengths))).to(self.device, torch.int64)
        self.token_ids[place[0], place[1]] = tokens.clamp(min=0).to(self.device, torch.int32)

    def _take(self, table: torch.Tensor, rows: IntArray, columns: IntArray) -> torch.Tensor:
        """Return elements of a table, int64. For few, NumPy takes a third of PyTorch's time."""
        if self.device.type == "cpu":
            return torch.from_numpy(table.numpy()[rows, columns].astype(np.int64))
        row, column = (
            torch.from_numpy(index).to(self.device, torch.int64) for index in (rows, columns)
        )
        return table[row, column].to(torch.int64)
