"""Pixels of pictures: made to check that a picture can be decoded, kept until a core asks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from toolkit.errors import InvalidParamError
from toolkit.pictures.pool import PicturePool, Pixels
from toolkit.pictures.sources import Encoded

MAX_BYTES = 256 * 2**20
MAX_DIGESTS = 2**14
T = TypeVar("T")
R = TypeVar("R")


class PixelSource:
    """Processes pictures in a pool. Requests that check the same picture at once share the work."""

    def __init__(self, pool: PicturePool) -> None:
        self._pool, self._cache = pool, PixelCache()
        self._checks: dict[bytes, _Check] = {}  # that run, by digest
        self._lock = threading.RLock()  # a future that is done calls back at once

    def check(self, encoded: Encoded, digest: bytes, param: str) -> Future[None]:
        """Process a picture unless it was before. Fails with InvalidRequestError."""
        if self._cache.is_decodable(digest):
            known: Future[None] = Future()
            known.set_result(None)
            return known
        with self._lock:
            check = self._checks.get(digest)
            if check is None:
                check = self._checks[digest] = _Check(self._pool.process(encoded, ""))
                check.pixels.add_done_callback(partial(self._finish, digest, check))
            check.num_waiting += 1
        leave = partial(self._leave, digest, check)
        return then(check.pixels, lambda _: None, param, cancel=leave)

    def load(self, encoded: Encoded, digest: bytes, param: str) -> Future[bytes]:
        """Return the pixels of a picture, once: they are not kept."""
        if (pixels := self._cache.pop(digest)) is not None:
            kept: Future[bytes] = Future()
            kept.set_result(pixels)
            return kept
        return then(self._pool.process(encoded, param), lambda found: found.data)

    def _finish(self, digest: bytes, check: _Check, done: Future[Pixels]) -> None:
        """Keep the pixels of a check, before its requests continue."""
        self._remove(digest, check)
        if not done.cancelled() and done.exception() is None:
            self._cache.put(digest, done.result().data)

    def _leave(self, digest: bytes, check: _Check) -> None:
        """Note that a request does not wait any longer. The last one cancels the work."""
        with self._lock:
            check.num_waiting -= 1
            if check.num_waiting:
                return
            self._remove(digest, check)
        check.pixels.cancel()

    def _remove(self, digest: bytes, check: _Check) -> None:
        with self._lock:
            if self._checks.get(digest) is check:
                del self._checks[digest]


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


class _Check:
    """Processing of a picture that requests wait for."""

    def __init__(self, pixels: Future[Pixels]) -> None:
        self.pixels, self.num_waiting = pixels, 0


def then(
    source: Future[T],
    convert: Callable[[T], R],
    param: str | None = None,
    *,
    cancel: Callable[[], object] | None = None,
) -> Future[R]:
    """Return the future of what `convert` makes of a result.

    `param`: replaces the parameter of errors. `cancel`: called if the returned future is cancelled,
    by default to cancel the source."""
    done: Future[R] = Future()

    def take(source: Future[T]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(convert(source.result()))
        except InvalidParamError as error:
            done.set_exception(error if param is None else InvalidParamError(param, error.problem))
        except BaseException as error:
            done.set_exception(error)

    def note(done: Future[R]) -> None:
        if done.cancelled():
            (cancel or source.cancel)()

    done.add_done_callback(note)
    source.add_done_callback(take)
    return done
