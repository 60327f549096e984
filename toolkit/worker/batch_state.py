"""The running requests as the device holds them: one stable row each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch
from toolkit.sampling.state import SamplingState
from toolkit.scheduler import NewRow, SchedulerOutput


class BatchState:
    """Row r belongs to one request from its admission to its end or preemption.

    `token_ids` [num_rows, max_model_len + 1] int32: prompt and output; a sampled token is written at its
    place by the device, so that the next step can read it before the host has seen it. `block_table`
    [num_rows, max_blocks] int32.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        self.token_ids = torch.zeros(num_rows, max_model_len + 1, dtype=torch.int32, device=device)
        max_blocks = -(-max_model_len // block_size)
        self.block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling = SamplingState(num_rows, device)

    def apply(self, step: SchedulerOutput) -> None:
        """Takes in who came and which blocks were added."""
        for new in step.new_rows:
            self._place(new)
        if len(step.new_blocks):
            row, index, block = torch.from_numpy(step.new_blocks).to(self.device).unbind(1)
            self.block_table[row, index] = block

    def _place(self, new: NewRow) -> None:
        self.token_ids[new.row, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int32)
        self.block_table[new.row, : len(new.blocks)] = torch.tensor(new.blocks, dtype=torch.int32)
        self.sampling.set(new.row, new.params, new.seed, new.num_prompt_tokens, new.eos_token_ids)

    def inputs(self, step: SchedulerOutput) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """(token ids [num_tokens], positions [num_tokens], both int64, and what attention is over) of a step.

        One small packed array goes to the device and is expanded there.
        """
        packed = torch.from_numpy(_pack(step)).to(self.device, non_blocking=True)
        rows, counts, computed = packed.to(torch.int64).unbind(0)
        total = step.total_tokens
        ends = counts.cumsum(0)
        query_start_loc = torch.nn.functional.pad(ends, (1, 0))
        request = torch.repeat_interleave(
            torch.arange(len(step.rows), device=self.device), counts, output_size=total
        )
        offsets = torch.arange(total, device=self.device) - query_start_loc[request]
        positions = computed[request] + offsets
        token_rows = rows[request]
        context_lens = step.num_computed + step.num_tokens
        max_seq_len = int(context_lens.max())
        block_table = self.block_table[rows, : -(-max_seq_len // self.block_size)]
        blocks = block_table[request, positions // self.block_size].to(torch.int64)
        batch = AttentionBatch(
            query_start_loc=query_start_loc.to(torch.int32),
            seq_lens=(computed + counts).to(torch.int32),
            block_table=block_table,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_lens=step.num_tokens,
            context_lens=context_lens,
            max_query_len=int(step.num_tokens.max()),
            max_seq_len=max_seq_len,
        )
        return self.token_ids[token_rows, positions].to(torch.int64), positions, batch


def _pack(step: SchedulerOutput) -> npt.NDArray[np.int32]:
    return np.stack((step.rows, step.num_tokens, step.num_computed))
