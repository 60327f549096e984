"""What requests need on the devices besides a row and blocks."""

from __future__ import annotations

from toolkit.scheduler.output import PlaceAdapter
from toolkit.scheduler.places import Places
from toolkit.scheduler.request import Request
from toolkit.sequence import Adapter


class Needs:
    """Has the devices' places, and the requests that wait for one.

    An adapter is held from the admission of its request to its end, or preemption."""

    def __init__(self, max_loras: int) -> None:
        self._adapters = Places[Request](max_loras)

    def can_begin(self, request: Request) -> bool:
        """Return True if a request can be admitted; else it waits, and `take_waiting` returns it.

        It is in no queue meanwhile."""
        adapter = request.spec.adapter
        if adapter is None or self._adapters.has_room(adapter.key):
            return True
        self._adapters.wait(adapter.key, request)
        return False

    def take_waiting(self) -> list[Request]:
        """Return requests that waited, and can begin now. Call again until there are none.

        They are those of one adapter, the first with a request that has not ended meanwhile."""
        found: list[Request] = []
        while taken := self._adapters.take_waiting():
            found += taken
            if not all(request.is_finished for request in taken):
                break
        return found

    def begin(self, request: Request, loads: list[PlaceAdapter]) -> int:
        """Take the places of a request that is admitted. Return its adapter's slot; 0: none.

        Adds to `loads` what the devices have to load first."""
        adapter = request.spec.adapter
        if adapter is None:
            return 0
        entry = self._adapters.enter(adapter.key)
        slot = 1 + entry.number
        if entry.is_new:
            loads.append(PlaceAdapter(slot, adapter.key))
        return slot

    def leave(self, request: Request) -> None:
        """Give back the places of a request that runs no longer."""
        if request.spec.adapter is not None:
            self._adapters.leave(request.spec.adapter.key)

    def num_running(self, adapter: Adapter) -> int:
        """Return how many requests with an adapter run."""
        return self._adapters.num_users(adapter.key)

    def clear(self) -> None:
        """Empty all places: what the devices have is unknown. No request runs."""
        self._adapters.clear()
