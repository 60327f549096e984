"""Messages about pictures between the server and the workers."""

from __future__ import annotations

from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec

MAX_ANSWER = 2**28  # bytes of pixels from a worker
_ITEM_SIZES = {"uint8": 1, "float32": 4}


class Job(msgspec.Struct, frozen=True, tag=True):
    """Picture for a worker. Its bytes follow."""

    answer: ClassVar[type[msgspec.Struct]]

    encoding: Literal["file", "base64", "rgb"]
    num_bytes: int
    size: tuple[int, int] = (0, 0)  # with rgb
    is_measured: bool = False  # only the size is wanted

    def expected_bytes(self, answer: Done) -> int:
        """Return the bytes of pixels. Raises ValueError for too many."""
        expected = 0 if self.is_measured else prod(answer.shape) * _ITEM_SIZES[answer.dtype]
        if expected > MAX_ANSWER:
            raise ValueError(f"pixels of {expected} bytes, more than {MAX_ANSWER}")
        return expected


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to a job. `num_bytes` of pixels follow, none if it was measured."""

    width: Annotated[int, msgspec.Meta(ge=1)]
    height: Annotated[int, msgspec.Meta(ge=1)]
    grid: tuple[int, ...] = ()
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    dtype: Literal["uint8", "float32"] = "uint8"
    num_bytes: int = 0
    is_last: bool = False  # the worker has grown, and ends


Job.answer = Done
