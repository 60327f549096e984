"""The order in which requests are scheduled: policies, the waiting queue, and suspects."""

import heapq
from collections.abc import Callable

from toolkit.scheduler.request import Request

Rank = tuple[int, int]  # the request with the lower rank is scheduled first and preempted last


def by_arrival(request: Request) -> Rank:
    return (0, request.arrival)


def by_priority(request: Request) -> Rank:
    return (request.spec.priority, request.arrival)


POLICIES: dict[str, Callable[[Request], Rank]] = {"fcfs": by_arrival, "priority": by_priority}
"""Values of --scheduling-policy."""


class RequestQueue:
    """Requests that wait for a row, by rank. Those that have ended are skipped."""

    def __init__(self, policy: str) -> None:
        self.rank = POLICIES[policy]
        self._heap: list[tuple[Rank, Request]] = []

    def __len__(self) -> int:
        """Return the number of requests, with those that ended while they waited."""
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Add a request, unless it has ended."""
        if not request.is_finished:
            heapq.heappush(self._heap, (self.rank(request), request))

    def first(self) -> Request | None:
        """Return the request with the lowest rank, or None if there is none."""
        while self._heap:
            request = self._heap[0][1]
            if not request.is_finished:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the first request."""
        heapq.heappop(self._heap)


class Suspects:
    """Requests of a failed step, of which only the first may run.

    One after another catches up alone, until the one that fails alone is found."""

    def __init__(self) -> None:
        self.num_failures = 0
        """Failures of steps since all suspects were cleared."""
        self.current: Request | None = None
        """The request that runs alone. None: there are no suspects."""
        self._others: list[Request] = []

    def try_alone(self, requests: list[Request]) -> None:
        """Run these requests one at a time, in this order, after a failure."""
        self.num_failures += 1
        self.current, *self._others = requests

    def clear_current(self) -> None:
        """Let the next suspect run."""
        self.current = self._others.pop(0) if self._others else None

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, if it is a suspect."""
        if request is self.current:
            self.clear_current()
        elif request in self._others:
            self._others.remove(request)
