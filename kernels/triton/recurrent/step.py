"""A step's requests, as the kernels of layers with a state for each request see them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.kernels.recurrent import CHUNK


class RecurrentStep:
    """A step's requests and the slots of their states, for all layers.

    starts: [num_reqs + 1], first token of each; lengths: with this step's tokens; max_query_len: an
    upper bound; reads and the rest: as in `toolkit.attention.StateRows`. Tensors are int32."""

    def __init__(
        self,
        starts: Tensor,
        lengths: Tensor,
        num_tokens: int,
        max_query_len: int,
        reads: Tensor,
        writes: Tensor,
        keeps: Tensor,
        after: Tensor,
    ) -> None:
        self.starts, self.lengths = starts, lengths
        self.reads, self.writes, self.keeps, self.after = reads, writes, keeps, after
        self.num_reqs = len(lengths)
        self.has_prompts = max_query_len > 1
        if self.has_prompts:
            most = 2 * min(self.num_reqs, max(1, num_tokens // 2))  # chunks that are not full
            self.max_chunks = num_tokens // CHUNK + most
            self._cut()

    def _cut(self) -> None:
        """Cut the tokens of requests with more than one into chunks.

        chunks: [max_chunks, 3], first token, end and request; chunk_starts: [num_reqs + 1], first
        chunk of each request. Chunks that are too many are empty."""
        lengths = self.starts[1:] - self.starts[:-1]
        kept = self.after.clamp(min=0)
        before = (kept + (CHUNK - 1)) // CHUNK
        counts = before + (lengths - kept + (CHUNK - 1)) // CHUNK
        counts = torch.where(lengths > 1, counts, 0)
        self.chunk_starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        numbers = torch.arange(self.max_chunks, dtype=torch.int32, device=counts.device)
        request = torch.searchsorted(self.chunk_starts[1:], numbers, right=True)
        request.clamp_(max=self.num_reqs - 1)
        number = numbers - self.chunk_starts[request]
        first, own_kept, own_before = self.starts[request], kept[request], before[request]
        is_before = number < own_before
        begin = torch.where(is_before, number * CHUNK, own_kept + (number - own_before) * CHUNK)
        most = torch.where(is_before, own_kept, lengths[request])
        end = torch.minimum(begin + CHUNK, most)
        is_there = number < counts[request]
        bounds = [torch.where(is_there, first + one, 0) for one in (begin, end)]
        self.chunks = torch.stack((*bounds, request.int()), 1)
