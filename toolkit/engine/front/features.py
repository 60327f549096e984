"""Features of a front end's requests: what their bytes are loaded from."""

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future

FeatureSource = Callable[[], Future[bytes]]
"""Starts to load the bytes of a feature. They may be loaded several times."""


class FeatureStore:
    """Keeps the source of each feature until the last request with it ends.

    Cores ask for what they lack, also those that replace one that has died."""

    def __init__(self) -> None:
        self._sources: dict[bytes, FeatureSource] = {}  # by digest
        self._num_users: Counter[bytes] = Counter()  # requests, by digest
        self._digests: dict[str, tuple[bytes, ...]] = {}  # by request id

    def hold(self, request_id: str, features: Mapping[bytes, FeatureSource]) -> None:
        """Keep the features of a request, by digest."""
        if features:
            self._sources |= features
            self._digests[request_id] = tuple(features)
            self._num_users.update(self._digests[request_id])

    def release(self, request_id: str) -> None:
        """Note that a request has ended."""
        for digest in self._digests.pop(request_id, ()):
            self._num_users[digest] -= 1
            if not self._num_users[digest]:
                del self._num_users[digest], self._sources[digest]

    def load(self, digest: bytes) -> Future[bytes] | None:
        """Load the bytes of a feature; None if no request has it."""
        source = self._sources.get(digest)
        return None if source is None else source()
