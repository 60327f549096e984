"""Bytes of the features of a front end's requests."""

from collections import Counter
from collections.abc import Mapping


class FeatureStore:
    """Keeps the bytes of each feature until the last request with it ends.

    Cores ask for what they lack, also those that replace one that has died."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}  # by digest
        self._num_users: Counter[bytes] = Counter()  # requests, by digest
        self._digests: dict[str, tuple[bytes, ...]] = {}  # by request id

    def hold(self, request_id: str, features: Mapping[bytes, bytes]) -> None:
        """Keep the features of a request, by digest."""
        if features:
            self._data |= features
            self._digests[request_id] = tuple(features)
            self._num_users.update(self._digests[request_id])

    def release(self, request_id: str) -> None:
        """Note that a request has ended."""
        for digest in self._digests.pop(request_id, ()):
            self._num_users[digest] -= 1
            if not self._num_users[digest]:
                del self._num_users[digest], self._data[digest]

    def find(self, digest: bytes) -> bytes | None:
        """Return the bytes of a feature; None if no request has it."""
        return self._data.get(digest)
