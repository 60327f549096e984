"""The interface of drafters."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from toolkit.scheduler import NewRow, SchedulerOutput

Drafts = npt.NDArray[np.int32]
"""[n, most]: tokens that may follow, padded with NO_DRAFT."""
NO_DRAFT = -1


class Drafter(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time and changes no token."""

    def place(self, new: NewRow) -> None:
        """Give a row to a request."""

    def observe(self, step: SchedulerOutput) -> None:
        """Take in a step that the model has computed, and whose tokens are committed."""

    def propose(self, rows: npt.NDArray[np.int32]) -> Drafts:
        """Return drafts for rows that got tokens in the step that was observed last."""
