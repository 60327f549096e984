"""The CUDA graphs of an engine, and the choice of one for a step.

A graph is a step of one padded shape: the fewer shapes, the more padding, and the more shapes, the
longer the start and the more memory. Steps without a graph run kernel by kernel."""

import bisect
from dataclasses import dataclass, replace
from functools import cached_property

from toolkit.scheduler import SchedulerOutput

MIXED_TOKENS = (
    *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), 2560, 3072, 4096, 6144,
    8192,
)  # fmt: skip
"""Padded token counts of captured steps that mix prompts and next tokens."""
SMALL_MIXED = 512  # number of tokens up to which padding costs next to nothing
MIN_FILL = 0.75  # share of tokens from which a larger captured step is faster than no graph
MAX_MIXED_CONTEXT = 8192
"""Longest context of a decoding request in a mixed graph, which does not split its keys."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Padded size of a step. The lengths are upper bounds for its requests."""

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    is_adapted: bool = False  # some requests may have LoRA adapters


@dataclass(frozen=True)
class GraphPolicy:
    """The graphs of an engine with these limits: decode steps by requests, mixed ones by tokens."""

    max_num_seqs: int
    max_num_tokens: int  # of a step
    max_model_len: int
    captures: bool = True
    """False if no step has a graph: --enforce-eager, or attention that cannot be captured."""
    adapts: bool = False
    """True if there are LoRA adapters. Each graph then has a twin for steps that use some."""

    @property
    def most_requests(self) -> int:
        """Most requests of a step."""
        return min(self.max_num_seqs, self.max_num_tokens)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a step."""
        return min(self.max_num_tokens, self.max_num_seqs * self.max_model_len)

    @cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """Numbers of requests of decode steps worth capturing."""
        sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
        most = self.most_requests
        return *(n for n in (*sizes, *range(576, most, 64)) if n < most), most

    @cached_property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens of mixed steps worth capturing."""
        useful = bisect.bisect_left(MIXED_TOKENS, self.most_tokens) + 1
        return tuple(n for n in MIXED_TOKENS[:useful] if n <= self.max_num_tokens)

    @cached_property
    def shapes(self) -> list[StepShape]:
        """Shapes to capture, largest first: the others then fit into its memory."""
        if not self.captures:
            return []
        shapes = [*map(self._decode_shape, self.decode_sizes)]
        shapes += map(self._mixed_shape, self.mixed_sizes)
        if self.adapts:
            shapes += [replace(shape, is_adapted=True) for shape in shapes]
        return sorted(shapes, key=lambda s: (s.num_tokens, s.max_query_len), reverse=True)

    def shape_for(self, step: SchedulerOutput, is_adapted: bool = False) -> StepShape | None:
        """Return the smallest captured shape that the step fits into. None: no graph is faster."""
        shape = self._plain_shape_for(step)
        return replace(shape, is_adapted=True) if shape is not None and is_adapted else shape

    def _plain_shape_for(self, step: SchedulerOutput) -> StepShape | None:
        if not self.captures:
            return None
        total = step.total_tokens
        if total == len(step.rows):
            size = _least(self.decode_sizes, total)
            return None if size is None else self._decode_shape(size)
        size = _least(self.mixed_sizes, total)
        if size is None or (size > SMALL_MIXED and total < MIN_FILL * size):
            return None
        if (step.num_computed[step.num_tokens == 1] >= MAX_MIXED_CONTEXT).any():
            return None
        return self._mixed_shape(size)

    def _decode_shape(self, size: int) -> StepShape:
        return StepShape(size, size, 1, self.max_model_len)

    def _mixed_shape(self, size: int) -> StepShape:
        return StepShape(size, min(size, self.max_num_seqs), size, self.max_model_len)


def _least(sizes: tuple[int, ...], at_least: int) -> int | None:
    """Return the smallest of the rising sizes that is not less, or None."""
    at = bisect.bisect_left(sizes, at_least)
    return sizes[at] if at < len(sizes) else None
