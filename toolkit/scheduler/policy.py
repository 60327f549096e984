"""Scheduling policies: the order among requests."""

from collections.abc import Callable

from toolkit.scheduler.request import Request

Rank = tuple[int, int]  # the request with the lower rank is scheduled first and preempted last


def by_arrival(request: Request) -> Rank:
    return (0, request.arrival)


def by_priority(request: Request) -> Rank:
    return (request.spec.priority, request.arrival)


POLICIES: dict[str, Callable[[Request], Rank]] = {"fcfs": by_arrival, "priority": by_priority}
"""Values of --scheduling-policy."""
