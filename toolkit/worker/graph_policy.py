"""The CUDA graphs of an engine, and the choice of one for a step.

A graph is a step of one padded shape: the fewer shapes, the more padding, and the more shapes, the
longer the start and the more memory (`step_sizes`). Steps without a graph run kernel by kernel."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from toolkit.scheduler import SchedulerOutput
from toolkit.worker.step_sizes import DECODE, MIXED, SAMPLED, VERIFY, sizes_below

MOST_STEP_DRAFTS = 512
"""Drafts of all requests of a step. From about as many tokens on, a step computes more than it
reads, and takes longer with each."""
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
    num_drafts: int = 0  # that it verifies, at most
    verifies: bool = False  # requests have their newest token and drafts, and nothing else

    @property
    def samples_all(self) -> bool:
        """True if it samples after every token."""
        return self.max_query_len == 1 or self.verifies

    @property
    def num_points(self) -> int:
        """Rows of logits: a token of each request, and its drafts."""
        return min(self.num_tokens, self.num_reqs + self.num_drafts)


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
    most_drafts: int = 0
    """Drafts of a request in a step. There are then graphs of steps that verify so many of each."""

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
        most = self.most_requests
        return *sizes_below(most, DECODE), most

    @property
    def most_step_drafts(self) -> int:
        """Most drafts of a step."""
        most = min(self.most_requests * self.most_drafts, MOST_STEP_DRAFTS)
        return max(0, min(most, self.max_num_tokens - self.most_requests))

    @cached_property
    def verify_sizes(self) -> tuple[int, ...]:
        """Numbers of requests of steps that verify drafts, worth capturing."""
        if not self.most_drafts:
            return ()
        most = min(self.most_requests, self.most_step_drafts // self.most_drafts)
        return sizes_below(most, VERIFY) + (most,) * (most > 0)

    @cached_property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens of mixed steps worth capturing."""
        sizes = sizes_below(self.max_num_tokens + 1, MIXED)
        return sizes[: bisect.bisect_left(sizes, self.most_tokens) + 1]

    @property
    def penalized_sizes(self) -> tuple[int, ...]:
        """Numbers of rows of logits that are sampled again, worth capturing."""
        most = self.max_num_seqs + self.most_step_drafts
        return *(n for n in SAMPLED if n < most), most

    @cached_property
    def shapes(self) -> list[StepShape]:
        """Shapes to capture, largest first: the others then fit into its memory."""
        if not self.captures:
            return []
        shapes = [*map(self._decode_shape, self.decode_sizes)]
        shapes += map(self.verify_shape, self.verify_sizes)
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
            size = least(self.decode_sizes, total)
            return None if size is None else self._decode_shape(size)
        decodes = step.num_own_tokens == 1
        if len(step.num_drafts) and decodes.all():
            size = least(self.verify_sizes, len(step.rows))
            if size is not None:
                return self.verify_shape(size)
        size = least(self.mixed_sizes, total)
        if size is None or (size > SMALL_MIXED and total < MIN_FILL * size):
            return None
        if (step.num_computed[decodes] >= MAX_MIXED_CONTEXT).any():
            return None
        return self._mixed_shape(size)

    def _decode_shape(self, size: int) -> StepShape:
        return StepShape(size, size, 1, self.max_model_len)

    def verify_shape(self, size: int) -> StepShape:
        """Return the shape of a step in which each request has the most drafts."""
        drafts, longest = size * self.most_drafts, 1 + self.most_drafts
        return StepShape(
            size + drafts, size, longest, self.max_model_len, num_drafts=drafts, verifies=True
        )

    def _mixed_shape(self, size: int) -> StepShape:
        num_reqs, drafts = min(size, self.max_num_seqs), self.most_step_drafts
        return StepShape(size, num_reqs, size, self.max_model_len, num_drafts=drafts)


def new_drafter_graphs(shapes: Sequence[StepShape]) -> list[tuple[bool, bool]]:
    """Return which graphs of a drafter's model are captured with each shape, in this order.

    (the run that follows the step, the next drafts). False: it has that of an earlier shape, or
    needs none."""
    followed: set[StepShape] = set()
    drafted: set[int] = set()
    found = []
    for shape in shapes:
        plain = replace(shape, is_adapted=False)
        drafts = shape.num_drafts > 0 and shape.num_reqs not in drafted
        found.append((plain not in followed, drafts))
        followed.add(plain)
        if drafts:
            drafted.add(shape.num_reqs)
    return found


def least(sizes: tuple[int, ...], at_least: int) -> int | None:
    """Return the smallest of the rising sizes that is not less, or None."""
    at = bisect.bisect_left(sizes, at_least)
    return sizes[at] if at < len(sizes) else None
