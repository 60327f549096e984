"""Weights that are read on a thread of their own, so that kernels can be compiled meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Fill = Callable[[threading.Event], None]
"""Fills a model, or ends early once the event is set."""


class Loading:
    """Begins at once."""

    def __init__(self, fill: Fill, device: torch.device) -> None:
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        """What filling it raised, until somebody is told: an error holds on to the model by its traceback."""
        self._thread = threading.Thread(target=self._run, args=(fill, device), name="loading")
        self._thread.start()

    def _run(self, fill: Fill, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # threads begin with the first GPU
            fill(self._stop)
        except BaseException as error:
            self._errors.append(error)

    def wait(self) -> None:
        """Until the model is filled. Raises what filling it raised."""
        self._thread.join()
        if self._errors:
            raise self._errors.pop()

    def stop(self) -> None:
        """Ends it after what it is reading."""
        self._stop.set()
        self._thread.join()
        self._errors.clear()
