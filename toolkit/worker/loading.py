"""Weights that are read on a thread of their own, so that kernels can be compiled meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

Fill = Callable[[threading.Event], None]
"""Fills a model, or ends early once the event is set."""


class Loading:
    """Begins at once."""

    def __init__(self, fill: Fill, device: torch.device) -> None:
        self._stop = threading.Event()
        self._done: Future[None] = Future()
        # A daemon, as an interpreter that ends would wait for all that is left to read.
        self._thread = threading.Thread(target=self._run, args=(fill, device), name="loading", daemon=True)
        self._thread.start()

    def _run(self, fill: Fill, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # threads begin with the first GPU
            fill(self._stop)
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def wait(self) -> None:
        """Until the model is filled. Raises what filling it raised."""
        self._done.result()
        self._thread.join()

    def stop(self) -> None:
        """Ends it after what it is reading."""
        self._stop.set()
        self._thread.join()
