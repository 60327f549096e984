"""Metadata of an architecture in a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.gguf.file import GGUF

MAX_SIZE = 2**31


class Values:
    """Metadata of the architecture."""

    def __init__(self, model: GGUF) -> None:
        self._model = model
        self._prefix = f"{model.get('general.architecture', str)}."

    def name(self, key: str) -> str:
        return self._prefix + key

    def get(self, key: str) -> Any:
        """Return a value, None if there is none. Equal values for all layers become one.

        Layers without attention have no heads of keys."""
        value = self._model.get(self.name(key), (int, float, str, list))
        if isinstance(value, list) and key == "attention.head_count_kv":
            value = [one for one in value if one != 0] or value
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            return value[0]
        if isinstance(value, list):
            raise CheckpointError(
                f"{self._model.files[0]} has a {self.name(key)} for each layer, {value[:8]}. tk "
                f"needs the same in all layers."
            )
        if isinstance(value, float):
            return shortest(value)
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive number. Raises CheckpointError for any other value."""
        value = self.get(key)
        if value is None and default is not None:
            value = default
        if not isinstance(value, int) or not 0 < value < MAX_SIZE:
            raise self.error(f"{self.name(key)} {value!r}, which is not a size")
        return value

    def number(self, key: str) -> int:
        """Return a number that may be 0, as it is if there is none. Raises CheckpointError."""
        value = self.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value < MAX_SIZE):
            raise self.error(f"{self.name(key)} {value!r}, which is not a number")
        return value or 0

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._model.files[0]} has {problem}. Fetch or copy it again, or convert the model "
            f"again."
        )

    def names(self) -> Iterator[str]:
        for key in self._model.metadata:
            if key.startswith(self._prefix):
                yield key.removeprefix(self._prefix)


def shortest(value: float) -> float:
    """Return the number with the fewest digits that rounds to this fp32 number."""
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
