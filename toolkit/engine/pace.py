"""When to launch the next step: as late as the device allows, so that new requests join it."""

import time

LEAD = 0.002  # seconds from a launch until the device could idle: to schedule, launch, and spare
RISE = 0.1  # weight of a step that took longer than those before it


class Pace:
    """Predicts when the device ends its step, from earlier steps of about the same size.

    A step that is launched when the one before it begins is fixed that early: a request that
    arrives meanwhile waits for both. The prediction is low rather than high, because a device that
    waits loses time for all requests."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], float] = {}  # by class of steps
        self._running: tuple[bool, int] | None = None
        self._began = 0.0

    def begin(self, num_tokens: int, num_requests: int) -> None:
        """Note that the device begins a step."""
        shift = max(0, num_tokens.bit_length() - 4)  # sizes within an eighth are alike
        self._running = num_tokens == num_requests, -(-num_tokens >> shift) << shift
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that the device has ended the step."""
        if self._running is not None:
            took = time.monotonic() - self._began
            known = self._seconds.get(self._running, took)
            self._seconds[self._running] = min(took, known + RISE * (took - known))
            self._running = None

    def spare_seconds(self) -> float:
        """Return for how long the next launch can wait; 0 if that is not known."""
        if self._running is None or self._running not in self._seconds:
            return 0.0
        left = self._seconds[self._running] - (time.monotonic() - self._began)
        return max(0.0, left - LEAD)
