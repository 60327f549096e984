"""Loading of weights in a thread, so that kernels can be compiled meanwhile."""

import threading
from collections.abc import Callable

import torch

Fill = Callable[[threading.Event], None]  # fills a model. Stops early when the event is set


class Loading:
    """Loading in a thread. It starts at once."""

    def __init__(self, fill: Fill, device: torch.device) -> None:
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        """Errors until they are raised. Their tracebacks keep the model alive."""
        self._thread = threading.Thread(target=self._run, args=(fill, device), name="loading")
        self._thread.start()

    def _run(self, fill: Fill, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # threads start on GPU 0
            fill(self._stop)
        except BaseException as error:
            self._errors.append(error)

    def wait(self) -> None:
        """Wait until the model is filled. Raises the loader's error."""
        self._thread.join()
        if self._errors:
            raise self._errors.pop()

    def stop(self) -> None:
        """Stop loading after the current tensor."""
        self._stop.set()
        self._thread.join()
        self._errors.clear()
