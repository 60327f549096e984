"""Times of the phases of a start-up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.worker.info import Report


class Phases:
    """Times phases of start-up: `with phases("weights"): ...`. Nested phases count separately."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._inside = 0.0  # seconds of nested phases

    @contextmanager
    def __call__(self, name: str, before: float = 0.0) -> Iterator[None]:
        """`before`: seconds that the phase has taken so far."""
        start, around, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        seconds = time.perf_counter() - start
        self.report(name, before + seconds - self._inside)
        self._inside = around + seconds
