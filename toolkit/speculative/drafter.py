"""The interface of drafters."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from toolkit.scheduler import NewRow

Drafts = npt.NDArray[np.int32]
"""[n, most]: tokens that may follow, padded with NO_DRAFT."""
NO_DRAFT = -1


class Drafter(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time and changes no token."""

    def place(self, new: NewRow) -> None:
        """Give a row to a request."""

    def propose(self, rows: npt.NDArray[np.int32]) -> Drafts:
        """Return drafts for rows that have just got tokens."""
