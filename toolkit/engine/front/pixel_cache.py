"""Pixels of pictures that were processed before a core asked for them."""

from __future__ import annotations

import threading
from collections import OrderedDict

MAX_BYTES = 256 * 2**20
MAX_DIGESTS = 2**14


class PixelCache:
    """Keeps processed pictures until a core takes them, and knows which can be decoded.

    Beyond MAX_BYTES the oldest pictures are dropped: they are processed again when a core asks.
    Methods may be called in any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._pixels: OrderedDict[bytes, bytes] = OrderedDict()  # by digest
        self._decodable: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def is_decodable(self, digest: bytes) -> bool:
        """Return True if a picture was processed before."""
        with self._lock:
            if digest not in self._decodable:
                return False
            self._decodable.move_to_end(digest)
            return True

    def put(self, digest: bytes, pixels: bytes) -> None:
        """Keep the pixels of a picture."""
        with self._lock:
            self._decodable[digest] = None
            if len(self._decodable) > MAX_DIGESTS:
                self._decodable.popitem(last=False)
            self._num_bytes += len(pixels) - len(self._pixels.pop(digest, b""))
            self._pixels[digest] = pixels
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._pixels.popitem(last=False)[1])

    def pop(self, digest: bytes) -> bytes | None:
        """Return and drop the pixels of a picture; None if there are none."""
        with self._lock:
            pixels = self._pixels.pop(digest, None)
            self._num_bytes -= len(pixels or b"")
            return pixels
