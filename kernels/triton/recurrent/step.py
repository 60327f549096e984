"""A step's requests, as the kernels of layers with a state for each request see them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from toolkit.kernels.recurrent import CHUNK


class RecurrentStep:
    """A step's requests and the slots of their states, for all layers.

    starts: [num_reqs + 1], first token of each; lengths: with this step's tokens; max_query_len: an
    upper bound; most_verified: tokens of a request whose state waits for those that are drafts;
    with more, it computes a prompt. The rest: as in `toolkit.attention.StateRows`. Tensors are
    int32."""

    def __init__(
        self,
        starts: Tensor,
        lengths: Tensor,
        num_tokens: int,
        max_query_len: int,
        most_verified: int,
        reads: Tensor,
        writes: Tensor,
        keeps: Tensor,
        kept: Tensor,
        begins: Tensor | None = None,
        written: Tensor | None = None,
    ) -> None:
        self.requests = starts, lengths, reads, writes, keeps, kept
        self.drafts = begins, written
        self.num_reqs, self.most_verified = len(lengths), most_verified
        self.has_prompts = max_query_len > most_verified
        if self.has_prompts:
            most = 2 * min(self.num_reqs, max(1, num_tokens // 2))  # chunks that are not full
            self.max_chunks = num_tokens // CHUNK + most
            self._cut()

    def _cut(self) -> None:
        """Cut prompts into chunks.

        chunks: [max_chunks, 4], first token, end, and the request with its first; chunk_starts:
        [num_reqs + 1], first chunk of each request; after: [num_reqs], tokens in the snapshot, 0:
        there is none. Chunks that are too many are empty."""
        starts, totals, _, _, keeps, kept = self.requests
        lengths = starts[1:] - starts[:-1]
        after = kept - totals + lengths
        is_kept = (keeps >= 0) & (after > 0) & (after <= lengths)
        self.after = after = torch.where(is_kept, after, 0)
        before = (after + (CHUNK - 1)) // CHUNK
        counts = before + (lengths - after + (CHUNK - 1)) // CHUNK
        counts = torch.where(lengths > self.most_verified, counts, 0)
        self.chunk_starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        numbers = torch.arange(self.max_chunks, dtype=torch.int32, device=counts.device)
        request = torch.searchsorted(self.chunk_starts[1:], numbers, right=True)
        request.clamp_(max=self.num_reqs - 1)
        number = numbers - self.chunk_starts[request]
        first, own_after, own_before = starts[request], after[request], before[request]
        is_before = number < own_before
        begin = torch.where(is_before, number * CHUNK, own_after + (number - own_before) * CHUNK)
        most = torch.where(is_before, own_after, lengths[request])
        end = torch.minimum(begin + CHUNK, most)
        is_there = number < counts[request]
        bounds = [torch.where(is_there, first + one, 0) for one in (begin, end)]
        self.chunks = torch.stack((*bounds, request.int(), first), 1)


@triton.jit
def tokens_of(request, start_ptr, length_ptr, read_ptr):
    """Return (first token, number of tokens, position of the first, slot to read) of a request."""
    first = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - first
    start = tl.load(length_ptr + request) - count
    return first, count, start, tl.load(read_ptr + request).to(tl.int64)


@triton.jit
def drafts_of(request, start, end, begin_ptr, written_ptr):
    """Return the numbers of tokens in the state that a request reads, and in what it writes."""
    begin, written = start, end
    if begin_ptr is not None:
        begin = tl.load(begin_ptr + request)
        written = tl.load(written_ptr + request)
    return begin, written


@triton.jit
def snapshot_of(request, begin, written, keep_ptr, kept_ptr):
    """Return the slot of a request's snapshot, and the number of tokens in it; 0: none."""
    keep = tl.load(keep_ptr + request).to(tl.int64)
    kept = tl.load(kept_ptr + request)
    is_kept = (keep >= 0) & (begin < kept) & (kept <= written)
    return keep, tl.where(is_kept, kept, 0)
