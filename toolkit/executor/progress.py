"""How many steps each rank has done, where the first rank's process can read it without asking."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class Progress:
    """Counters in a file that all ranks have mapped."""

    def __init__(self, meeting: Path, size: int) -> None:
        path = meeting / "steps"
        with path.open("ab") as file:
            file.truncate(8 * size)
        self._counts = np.memmap(path, np.int64, "r+", shape=(size,))

    def count(self, rank: int) -> None:
        """A rank has done one more."""
        self._counts[rank] += 1

    def behind(self, steps: int) -> list[int]:
        """The ranks that have done fewer."""
        return [int(rank) for rank in np.flatnonzero(self._counts < steps)]
