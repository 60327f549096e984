"""Choice of how many drafts a step verifies: as many as are expected to make it faster."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from toolkit.scheduler.output import IntArray

FADING = 0.9  # weight of a row's past, with each step that verified drafts
IDLE_FADING = 0.99  # the same, with each step without
IDLE_FADING_IF_SLOW = 0.998  # the same, if guessing takes time: wrong drafts are tried less often
PRIOR_WEIGHT = 2.0  # drafts that the expectation for a new row counts as
FIRST_GUESS = 0.6  # expected acceptance before anything is known
Rows = npt.NDArray[np.intp]


class AcceptanceRates:
    """Share of each row's drafts that were right, of those that followed right ones."""

    def __init__(self, num_rows: int, idle_fading: float = IDLE_FADING) -> None:
        self._idle_fading = idle_fading
        self._accepted = np.zeros(num_rows)
        self._tried = np.zeros(num_rows)
        self._all_accepted = self._all_tried = 0.0

    def reset(self, row: int) -> None:
        """Expect of a new request what others had lately."""
        self._accepted[row] = self._tried[row] = 0.0

    def learn(self, rows: Rows, num_drafts: IntArray, num_accepted: IntArray) -> None:
        """Take in a step's results [n]. The draft after the last right one was tried, too."""
        tried = np.minimum(num_accepted + 1, num_drafts)
        fading = np.where(tried > 0, FADING, self._idle_fading)
        self._accepted[rows] = fading * self._accepted[rows] + num_accepted
        self._tried[rows] = fading * self._tried[rows] + tried
        fading_of_all = self._idle_fading
        self._all_accepted = fading_of_all * self._all_accepted + float(num_accepted.sum())
        self._all_tried = fading_of_all * self._all_tried + float(tried.sum())

    def of(self, rows: Rows) -> npt.NDArray[np.float64]:
        """Return the expected rates [n], 0 to 1."""
        expected = (self._all_accepted + PRIOR_WEIGHT * FIRST_GUESS) / (
            self._all_tried + PRIOR_WEIGHT
        )
        rates: npt.NDArray[np.float64] = (self._accepted[rows] + PRIOR_WEIGHT * expected) / (
            self._tried[rows] + PRIOR_WEIGHT
        )
        return rates


Times = Sequence[tuple[int, float]]
"""(size, seconds), rising."""


class StepTimes(msgspec.Struct, frozen=True):
    """Seconds of steps, measured before the first request."""

    plain: Times = ()
    """By the number of tokens. Empty: nothing is known, and all drafts are useful."""
    verifying: Times = ()
    """By requests, of steps in which all are padded to the most drafts. Empty: none are padded."""
    drafting: Times = ()
    """By requests, of the drafter alone. Empty: it takes no time, or `verifying` includes it."""

    @property
    def idle_fading(self) -> float:
        """Weight of a row's past acceptance, with each step without drafts."""
        return IDLE_FADING_IF_SLOW if self.drafting else IDLE_FADING


UNKNOWN_TIMES = StepTimes()


class StepCosts:
    """Estimates the seconds of steps."""

    def __init__(self, times: StepTimes) -> None:
        self._tokens, self._seconds = _columns(times.plain)
        self._requests, self._padded = _columns(times.verifying)
        self._drafting = _columns(times.drafting)

    def at(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return seconds, linear between the measured steps and after the last two."""
        seconds: npt.NDArray[np.float64] = np.interp(tokens, self._tokens, self._seconds)
        if len(self._tokens) > 1:
            per_token = np.diff(self._seconds)[-1] / np.diff(self._tokens)[-1]
            seconds += per_token * np.maximum(tokens - self._tokens[-1], 0)
        return seconds

    def useful(
        self, num_drafts: IntArray, rates: npt.NDArray[np.float64], num_tokens: int
    ) -> IntArray:
        """Return how many of the drafts [n] to verify for the most tokens per second.

        rates: [n], acceptance; num_tokens: tokens of the step without drafts."""
        if not len(self._tokens):
            return num_drafts
        if len(self._requests):
            return num_drafts * self._pays(num_drafts, rates, num_tokens)
        nth = np.arange(1, num_drafts.max(initial=0) + 1)
        # A draft is worth verifying by the chance that it and all before it are right.
        chances = np.where(nth <= num_drafts[:, None], rates[:, None] ** nth, 0.0)
        best_first = np.sort(chances, axis=None)[::-1]
        count = np.arange(len(best_first) + 1)
        gained = len(num_drafts) + np.concatenate(([0.0], best_first.cumsum()))
        best = int(np.argmax(gained / self.at((num_tokens + count).astype(np.float64))))
        if best == 0:
            return np.zeros_like(num_drafts)
        useful: IntArray = np.count_nonzero(
            (chances >= best_first[best - 1]) & (chances > 0), axis=1
        ).astype(np.int32)
        return useful

    def pays_to_draft(self, most: IntArray, rates: npt.NDArray[np.float64]) -> bool:
        """Return whether drafts for the next step of these requests [n] make it faster.

        most: [n], drafts; rates: [n], acceptance."""
        count = len(most)
        drafts = self.useful(most, rates, count)
        if not drafts.any():
            return False
        if not len(self._drafting[0]):
            return True
        drafting = np.interp(count, *self._drafting)
        before, after = self.at(np.array([count, count + drafts.sum()], np.float64))
        gained = _expected(drafts, rates).sum()
        return bool((count + gained) * before > count * (after + drafting))

    def _pays(
        self, num_drafts: IntArray, rates: npt.NDArray[np.float64], num_tokens: int
    ) -> np.bool_:
        """Return whether all of the drafts bring more tokens per second than none."""
        num_requests = len(num_drafts)
        gained = _expected(num_drafts, rates).sum()
        before, drafted = self.at(np.array([num_tokens, num_tokens + num_drafts.sum()], np.float64))
        if num_tokens <= num_requests:  # no prompts: a graph of so many requests
            drafted = np.interp(num_requests, self._requests, self._padded)
        pays: np.bool_ = (num_requests + gained) * before > num_requests * drafted
        return pays


def _expected(num_drafts: IntArray, rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how many of the drafts [n] are expected to be right."""
    return rates * (1 - rates**num_drafts) / np.maximum(1 - rates, 1e-6)


def _columns(measured: Times) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return (sizes, seconds). No step takes longer than a larger one: busy cores only delay."""
    sizes = np.array([size for size, _ in measured], np.float64)
    from_largest = [seconds for _, seconds in reversed(measured)]
    return sizes, np.minimum.accumulate(from_largest or [0.0])[::-1]
