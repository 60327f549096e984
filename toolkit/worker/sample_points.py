"""The positions of a step at which tokens are sampled: after the newest token and each draft."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toolkit.scheduler import SchedulerOutput
from toolkit.scheduler.output import IntArray


@dataclass(frozen=True, slots=True)
class SamplePoints:
    """Points of all sampling requests, in their order: parallel arrays [num_points]."""

    which: npt.NDArray[np.int64]
    """[num_sampled]: the sampling requests, as indices into the step."""
    counts: IntArray  # [num_sampled], points of each: 1 + its drafts
    rows: IntArray
    positions: IntArray  # of the tokens to sample
    tokens: npt.NDArray[np.int64]  # the tokens of the step that they follow, as indices
    samples: npt.NDArray[np.int64]  # whose they are, as indices into `which`

    @classmethod
    def of(cls, step: SchedulerOutput, ends: IntArray) -> "SamplePoints":
        """ends: [num_sampled], number of tokens of each sampling request, drafts included."""
        which, counts = np.flatnonzero(step.samples), step.num_sampled
        last, rows = step.num_tokens.cumsum()[which] - 1, step.rows[which]
        samples = np.arange(len(which))
        if not len(step.num_drafts):
            return cls(which, counts, rows, ends, last, samples)
        samples = np.repeat(samples, counts)
        back = counts.cumsum()[samples] - 1 - np.arange(len(samples))  # 0 for a request's last
        positions = (ends[samples] - back).astype(np.int32)
        return cls(which, counts, rows[samples], positions, last[samples] - back, samples)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def firsts(self) -> npt.NDArray[np.int64]:
        """[num_sampled]: the first point of each sampling request."""
        ends: npt.NDArray[np.int64] = self.counts.cumsum()
        return ends - self.counts

    def of_requests(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the points of some of the requests, given as rising indices into the step."""
        wanted = np.zeros(len(self.which), np.bool_)
        wanted[np.searchsorted(self.which, which)] = True
        return np.flatnonzero(wanted[self.samples])

    def accepted(
        self, tokens: IntArray, drafts: IntArray
    ) -> tuple[IntArray, npt.NDArray[np.int64]]:
        """Return (number of each request's tokens to keep, the points of those tokens).

        tokens: [num_points], sampled; drafts: [num_points], tokens at the points' positions, of
        which the last of each request means nothing. A token is kept if all drafts before it are
        equal to the tokens sampled there."""
        if len(self) == len(self.which):
            return self.counts, np.arange(len(self))
        firsts = self.firsts
        nth = np.arange(len(self)) - firsts[self.samples]
        is_wrong = (tokens != drafts) | (nth == self.counts[self.samples] - 1)
        first_wrong = np.where(is_wrong, nth, self.counts[self.samples])
        kept = np.minimum.reduceat(first_wrong, firsts) + 1
        return kept.astype(np.int32), np.flatnonzero(nth < kept[self.samples])
