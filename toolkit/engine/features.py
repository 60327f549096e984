"""Features of a core's requests: their bytes, which the front ends keep and send when asked."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.engine.messages import NeedFeature
from toolkit.scheduler import Request
from toolkit.sequence import Feature

_NOT_FOUND = "the front end does not have its picture or sound any more"


class Features:
    """Has the bytes of each feature while an unfinished request needs them.

    A request waits until those that it lacks are here. Of several requests that wait for the same
    bytes, the front end of the first is asked, once."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}  # by digest
        self._users: dict[bytes, dict[Request, None]] = {}  # by digest, in order of arrival
        self._missing: dict[Request, set[bytes]] = {}  # digests that each request waits for
        self._queued: set[Request] = set()  # those of `_missing` that the scheduler has
        self._asked: dict[bytes, int] = {}  # the client that was asked, by digest
        self._asks: list[tuple[int, NeedFeature]] = []
        self._ready: list[Request] = []
        self._failed: dict[Request, str] = {}

    def add(self, request: Request, lacking: Iterable[Feature]) -> None:
        """Take a request. `pop_ready` returns it once the bytes of those that it lacks are here."""
        for feature in request.spec.features:
            self._users.setdefault(feature.digest, {})[request] = None
        if missing := {feature.digest for feature in lacking} - self.data.keys():
            self._missing[request] = missing
            for digest in missing:
                self._ask(digest)
        else:
            self._ready.append(request)

    def require(self, request: Request, feature: Feature) -> bool:
        """Return True if a feature's bytes are here, else ask for them: they were not needed when
        the request was added."""
        if feature.digest in self.data:
            return True
        self._missing.setdefault(request, set()).add(feature.digest)
        self._queued.add(request)
        self._ask(feature.digest)
        return False

    def leave(self, request: Request) -> None:
        """Note that a request has ended."""
        self._missing.pop(request, None)
        self._queued.discard(request)
        for digest in {feature.digest for feature in request.spec.features}:
            users = self._users.get(digest, {})
            users.pop(request, None)
            if not users:
                self._users.pop(digest, None)
                self.data.pop(digest, None)
                self._asked.pop(digest, None)

    def receive(self, digest: bytes, client: int, data: bytes | None, error: str = "") -> None:
        """Take a client's answer. None: it has no request with this feature any more, or `error`
        is the reason."""
        if self._asked.get(digest) == client:
            del self._asked[digest]
        if data is None:
            waiting = self._waiting_for(digest)
            for request in [one for one in waiting if one.client == client]:
                del self._missing[request]
                self._failed[request] = error or _NOT_FOUND
            self._ask(digest)
        elif digest in self._users:
            self.data[digest] = data
            for request in self._waiting_for(digest):
                self._missing[request].remove(digest)
                if not self._missing[request]:
                    del self._missing[request]
                    if request not in self._queued:
                        self._ready.append(request)
                    self._queued.discard(request)

    def drop(self, digest: bytes) -> None:
        """Drop bytes that were used. They are asked for again if they are needed again."""
        self.data.pop(digest, None)

    def forget_client(self, client: int) -> None:
        """Ask other clients for what this one, which has exited, was asked for."""
        for digest in [one for one, asked in self._asked.items() if asked == client]:
            del self._asked[digest]
            self._ask(digest)

    def pop_asks(self) -> list[tuple[int, NeedFeature]]:
        """Return messages to clients."""
        asks, self._asks = self._asks, []
        return asks

    def pop_ready(self) -> list[Request]:
        """Return requests with all bytes."""
        ready, self._ready = self._ready, []
        return [request for request in ready if not request.is_finished]

    def pop_failed(self) -> Iterable[tuple[Request, str]]:
        """Return (request, reason) for requests whose bytes cannot be had."""
        failed, self._failed = self._failed, {}
        return [(request, reason) for request, reason in failed.items() if not request.is_finished]

    def _waiting_for(self, digest: bytes) -> list[Request]:
        users = self._users.get(digest, {})
        return [request for request in users if digest in self._missing.get(request, ())]

    def _ask(self, digest: bytes) -> None:
        waiting = [request for request in self._waiting_for(digest) if not request.is_finished]
        if waiting and digest not in self._asked:
            self._asked[digest] = waiting[0].client
            self._asks.append((waiting[0].client, NeedFeature(digest)))
