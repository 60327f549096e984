"""Places and features that requests need on the devices, besides a row and blocks."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.scheduler.encoder_cache import EncoderCache
from toolkit.scheduler.output import Encode, Load, PlaceAdapter
from toolkit.scheduler.places import Places
from toolkit.scheduler.request import Request, RequestStatus
from toolkit.scheduler.stats import StatsRecorder
from toolkit.sequence import Adapter, Feature


class Needs:
    """Has the devices' places, and the requests that wait for one.

    An adapter is held from the admission of its request to its end, or preemption. A feature is
    held by a running request from the step that loads it for one of its chunks until its last
    token is computed. One step loads it and a later one reads it, so that steps stay short."""

    def __init__(
        self, max_loras: int, cache: EncoderCache, most_encoded: int, stats: StatsRecorder
    ) -> None:
        """`most_encoded`: rows of features that a step computes, or one feature."""
        self._adapters = Places[Request](max_loras)
        self.cache = cache
        self._most_encoded, self._stats = most_encoded, stats
        self._held: dict[Request, list[Feature]] = {}
        self._passed: list[tuple[Request, Feature]] = []  # in the latest step
        self._step, self._num_encoded = -1, 0
        self.has_bytes: Callable[[Request, Feature], bool] = lambda request, feature: True
        """Returns True if a feature can be computed; else its bytes are on their way."""
        self.loading: list[Request] = []
        """Requests whose features this step computes."""

    def begin_step(self, step: int) -> None:
        """Begin to plan a step. What the one before was the last to read is released."""
        self._step, self._num_encoded, self.loading = step, 0, []
        for request, feature in self._passed:
            self.cache.release(feature, request)
        self._passed.clear()

    # ---- adapters: for all of the request

    def can_begin(self, request: Request) -> bool:
        """Return True if a request's adapter has room; else it waits for `take_waiting`.

        It is in no queue meanwhile."""
        adapter = request.spec.adapter
        if adapter is None or self._adapters.has_room(adapter.key):
            return True
        self._adapters.wait(adapter.key, request)
        return False

    def take_waiting(self) -> list[Request]:
        """Return requests that waited, and can begin now.

        They are those of one adapter, the first with a request that has not ended meanwhile."""
        found: list[Request] = []
        while taken := self._adapters.take_waiting():
            found += taken
            if not all(request.is_finished for request in taken):
                break
        return found

    def begin(self, request: Request, loads: list[Load]) -> int:
        """Take the place of a request that is admitted. Return its adapter's slot; 0: none.

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
        for feature in self._held.pop(request, ()):
            self.cache.release(feature, request)

    def num_running(self, adapter: Adapter) -> int:
        """Return how many requests with an adapter run."""
        return self._adapters.num_users(adapter.key)

    # ---- features: for the chunks that have their tokens

    def reach(self, request: Request, start: int, count: int, loads: list[Load]) -> int:
        """Return how many of a request's `count` tokens from `start` on this step can compute.

        It ends before the first feature that no earlier step has computed. As many of those in
        the tokens as fit are loaded; a running request holds them."""
        is_running = request.status is RequestStatus.RUNNING
        wanted = _within(request, start, count)
        for index, feature in enumerate(wanted):
            is_loaded = (
                feature not in self.cache
                and self.has_bytes(request, feature)
                and self._load(request, feature, wanted[:index], loads)
            )
            if is_loaded:
                self.loading.append(request)
            if feature not in self.cache:
                return uncut(request, start, _before(feature, start, count))
            if is_running:
                self._hold(request, feature)
            if not self.cache.is_ready(feature, self._step):
                count = _before(feature, start, count)
        return uncut(request, start, count)

    def read(self, request: Request, start: int, count: int) -> None:
        """Note that this step computes tokens of a request, and reads their features."""
        for feature in _within(request, start, count):
            self._hold(request, feature)
        held = self._held.get(request, [])
        for feature in [one for one in held if one.end <= start + count]:
            held.remove(feature)
            self._passed.append((request, feature))
        if not held:
            self._held.pop(request, None)

    def _hold(self, request: Request, feature: Feature) -> None:
        held = self._held.setdefault(request, [])
        if feature not in held:
            held.append(feature)
            self._stats.current.mm_cache_queries += 1
            self._stats.current.mm_cache_hits += self.cache.hold(feature, request)

    def _load(
        self, request: Request, feature: Feature, sooner: list[Feature], loads: list[Load]
    ) -> bool:
        """Have this step compute a feature. Return False if there is no room.

        `sooner`: features that are needed before it, and stay in the cache."""
        rows = self._num_encoded + feature.num_rows
        if self._num_encoded and rows > self._most_encoded:
            return False
        load = self.cache.load(feature, self._step, sooner, request)
        if load is None:
            return False
        self._num_encoded = rows
        loads.append(load)
        return True

    # ---- features that all tokens of a request read, in pages of the pool (`CacheGroup.feature`)

    def can_encode(self, request: Request, num_rows: int) -> bool:
        """Return True if this step can compute a request's feature of so many rows."""
        if self._num_encoded and self._num_encoded + num_rows > self._most_encoded:
            return False
        return self.has_all_bytes(request)

    def has_all_bytes(self, request: Request) -> bool:
        """Return True if all features of a request can be computed."""
        return all(self.has_bytes(request, feature) for feature in request.spec.features)

    def begin_with_feature(self, request: Request, *, is_new: bool) -> None:
        """Count the feature of a request that is admitted. is_new: the step computes it."""
        self._stats.current.mm_cache_queries += len(request.spec.features)
        self._stats.current.mm_cache_hits += 0 if is_new else len(request.spec.features)

    def encode(self, request: Request, num_rows: int, pages: list[int], loads: list[Load]) -> None:
        """Have this step compute the feature of a request into pages, before its tokens."""
        self._num_encoded += num_rows
        loads += (Encode(one.digest, pages, one.grid) for one in request.spec.features)
        self.loading.append(request)

    def clear(self) -> None:
        """Empty all places: what the devices have is unknown. No request runs."""
        self._adapters.clear()
        self._passed.clear()
        self.cache.clear()


def _within(request: Request, start: int, count: int) -> list[Feature]:
    """Return the features with tokens among `count` from `start` on, in order."""
    end = start + count
    return [
        feature
        for feature in request.spec.features
        if any(first < end and first + length > start for first, length in feature.runs)
    ]


def _before(feature: Feature, start: int, count: int) -> int:
    """Return how many of `count` tokens from `start` on are before a feature's next token."""
    first = min(max(begin, start) for begin, length in feature.runs if begin + length > start)
    return min(count, first - start)


def uncut(request: Request, start: int, count: int) -> int:
    """Return `count`, or less, so that no run is cut whose tokens see each other."""
    for feature in request.spec.features:
        for first, length in feature.runs if feature.both_ways else ():
            if first < start + count < first + length:
                count = max(0, first - start)
    return count


def longest_run(request: Request) -> int:
    """Return the most tokens that see each other, which one step computes; 0: none do."""
    runs = (one.runs for one in request.spec.features if one.both_ways)
    return max((length for own in runs for _, length in own), default=0)
