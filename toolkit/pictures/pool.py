"""Processes that turn pictures into pixels, as the server and the offline engine use them."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec

from toolkit.errors import InvalidParamError
from toolkit.pictures.messages import Done, Job
from toolkit.pictures.settings import PictureLimits, ProcessorSettings
from toolkit.pictures.sources import Encoded
from toolkit.zygote.messages import Start
from toolkit.zygote.pool import WorkerPool
from toolkit.zygote.tasks import Task

_SIZES, _PIXELS = "sizes", "pixels"  # queues


class Pixels(msgspec.Struct, frozen=True):
    """A picture for the vision tower."""

    width: int  # of the picture, after EXIF rotation
    height: int
    grid: tuple[int, ...]  # what the processor made of it, e.g. (1, rows, columns) of patches
    shape: tuple[int, ...]
    dtype: str  # "uint8" or "float32"
    data: bytes


class PicturePool:
    """Decodes pictures with workers, each one at a time.

    The zygote lends workers for sizes before pixels. So two threads are for sizes only."""

    def __init__(
        self, settings: ProcessorSettings, limits: PictureLimits, keeper_path: str = ""
    ) -> None:
        """`keeper_path`: socket of the `KeeperServer` whose zygote to use, not one of this pool."""
        self._limits = limits
        start = Start(
            subject="pictures",
            means="The image processor of the model",
            module="toolkit.pictures.work",
            settings=msgspec.msgpack.encode((settings, limits), order="deterministic"),
            timeout=limits.timeout,
        )
        self._pool = WorkerPool(start, (_SIZES, _PIXELS), keeper_path)

    def start(self) -> None:
        """Start the zygote and return at once."""
        self._pool.start()

    def wait_ready(self) -> None:
        """Wait until the image processor is imported. Raises ToolkitError if it cannot be."""
        self._pool.wait_ready()

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, whose children are the workers. 0 if it is not the pool's."""
        return self._pool.zygote_pid

    def measure(self, encoded: Encoded, param: str) -> Future[tuple[int, int]]:
        """Read (width, height) after EXIF rotation from the header.

        The future's errors: InvalidRequestError, ServerUnavailableError, EngineError."""
        task = _SizeTask(encoded, param)
        if (size := encoded.raw_size) is None:
            self._pool.put(_SIZES, task)
        elif self._is_too_large(size):
            task.future.set_exception(self._too_large(param, size))
        else:
            task.future.set_result(size)
        return task.future

    def process(self, encoded: Encoded, param: str) -> Future[Pixels]:
        """Decode and resize a picture. The future's errors are those of `measure`."""
        task = _PixelTask(encoded, param)
        if (size := encoded.raw_size) is not None and self._is_too_large(size):
            task.future.set_exception(self._too_large(param, size))
        else:
            self._pool.put(_PIXELS, task)
        return task.future

    def close(self) -> None:
        """End all processes of the pool. Pictures that are not done get an error."""
        self._pool.close()

    def _is_too_large(self, size: tuple[int, int]) -> bool:
        return size[0] * size[1] > self._limits.max_pixels

    def _too_large(self, param: str, size: tuple[int, int]) -> InvalidParamError:
        most = self._limits.max_pixels
        return InvalidParamError(
            param, f"is a picture of {size[0]} x {size[1]} pixels; at most {most:,} are allowed"
        )


class _PictureTask(Task):
    """A picture that waits for a worker."""

    def __init__(self, encoded: Encoded, param: str) -> None:
        super().__init__(param)
        self._encoded = encoded

    def job(self) -> tuple[Job, bytes]:
        data, size = self._encoded.data, self._encoded.raw_size
        if isinstance(data, str):
            data = data.encode(errors="surrogatepass")
            return Job("base64", len(data), is_measured=self.is_urgent), data
        if size is not None:
            return Job("rgb", len(data), size, self.is_urgent), data
        return Job("file", len(data), is_measured=self.is_urgent), data


class _PixelTask(_PictureTask):
    """A picture to decode and resize."""

    def result(self, answer: Done, data: bytearray | bytes) -> Pixels:
        return Pixels(
            answer.width, answer.height, answer.grid, answer.shape, answer.dtype, bytes(data)
        )


class _SizeTask(_PictureTask):
    """A picture to measure."""

    is_urgent = True

    def result(self, answer: Done, data: bytearray | bytes) -> tuple[int, int]:
        return answer.width, answer.height
