"""Read the quantization_config of a checkpoint. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.weights.formats.packing import Header, Packing

Find = Callable[[str], Packing | None]
"""Returns the packing of a projection by its name in the model. None: not quantized."""

_TITLES = {"gptq": "GPTQ", "awq": "AWQ", "auto-round": "AutoRound"}


@dataclass(frozen=True)
class Packings:
    """The packing of each projection of a checkpoint."""

    method: str  # for messages
    find_by_name: Find
    header: Header

    @property
    def title(self) -> str:
        """The method as its authors write it."""
        return _TITLES.get(self.method, self.method)

    def find(self, name: str) -> Packing | None:
        """Return the packing of a projection. The checkpoint's tensors have the last word.

        Raises CheckpointError for an unsupported one."""
        try:
            packing = self.find_by_name(name)
        except ValueError as error:
            raise CheckpointError(
                f"{name} is quantized by {self.method} in a way that tk cannot read: {error}."
            ) from None
        if packing is None or not self.header or self._has(f"{name}.{packing.main}"):
            return packing
        return packing if not self._has(f"{name}.weight") else None

    def layouts(self, names: Iterable[str]) -> str:
        """Name the layouts of quantized projections: of those among `names`, most common first."""
        found = (self.find(name) for name in names)
        counts = Counter(str(packing.layout) for packing in found if packing is not None)
        return "; ".join(layout for layout, _ in counts.most_common())

    def _has(self, name: str) -> bool:
        return name in self.header


class Fields:
    """Typed access to a JSON object. All methods raise ValueError for a value of another type."""

    def __init__(self, raw: Mapping[str, Any], path: str = "quantization_config") -> None:
        self._raw, self.path = raw, path

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of some fields that is there and not null."""
        for name in names:
            if self._raw.get(name) is not None:
                return self._raw[name]
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if value is None:
            raise ValueError(f"{self.path} lacks {names[0]}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(names, value, "an integer")
        return value

    def boolean(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise self._wrong(names, value, "true or false")
        return value

    def text(self, *names: str, default: str = "") -> str:
        value = self.get(*names, default=default)
        if not isinstance(value, str):
            raise self._wrong(names, value, "a string")
        return value

    def names(self, *names: str, default: Sequence[str] = ()) -> list[str]:
        """Return a list of strings, the default without the field."""
        value = self.get(*names, default=[*default])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(names, value, "a list of strings")
        return value

    def fields(self, *names: str) -> Fields:
        """Return an object, empty without the field."""
        value = self.get(*names, default={})
        if not isinstance(value, dict):
            raise self._wrong(names, value, "an object")
        return Fields(value, f"{self.path}.{names[0]}")

    def items(self) -> list[tuple[str, Fields]]:
        """Return the fields, which are objects, in order."""
        return [(name, self.fields(name)) for name in self._raw]

    def over(self, other: Fields) -> Fields:
        """Return these fields, and those of `other` that are not here."""
        return Fields({**other._raw, **self._raw}, self.path)

    def bits(self, *supported: int) -> int:
        """Return the bits of a weight. Raises ValueError for an unsupported number."""
        bits = self.integer("bits", "w_bit")
        if bits not in supported:
            raise ValueError(f"its weights have {bits} bits, and tk reads {_listed(supported)}")
        return bits

    def require(self, name: str, *accepted: Any, instead: str = "") -> None:
        """Raise ValueError if a field is there and has none of the accepted values."""
        value = self.get(name)
        if value is not None and value not in accepted:
            shown = ", ".join(map(str, accepted))
            raise ValueError(
                f"{self.path}.{name} is {value!r}, and tk reads {shown}"
                f"{f'. {instead}' if instead else ''}"
            )

    def _wrong(self, names: tuple[str, ...], value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.path}.{names[0]} is {value!r} instead of {wanted}")


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern of compressed-tensors matches a module: a name, or re:expression."""
    if pattern.startswith("re:"):
        return match(pattern.removeprefix("re:"), name)
    return pattern == name


def match(expression: str, name: str) -> bool:
    """Match the beginning of a name. Raises ValueError for an invalid regular expression."""
    try:
        return re.match(expression, name) is not None
    except re.error as error:
        raise ValueError(f"{expression!r} is no regular expression: {error}") from None


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
