"""Packings: the ways in which checkpoints store a quantized projection."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from toolkit.errors import ConfigError
from toolkit.weights.layout import Kind, Layout

if TYPE_CHECKING:
    import torch

    from toolkit.distributed import Shard
    from toolkit.weights.groups import Decoded

Parts = Mapping[str, "torch.Tensor"]
"""This rank's parts of a projection's tensors, by the ends of their names."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint."""

    @property
    def kind(self) -> str:
        """Type, as safetensors names it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Header = Mapping[str, StoredTensor]
"""Tensors of a checkpoint by name. Empty if it is not known."""


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a stored tensor."""

    type: str  # PyTorch's name of the type that it is read in
    region: tuple[Shard, ...] | None = None  # None: all of it, whatever its shape
    is_optional: bool = False
    is_used: bool = True  # False: it may be there, and is not read


@dataclass(frozen=True, slots=True)
class Packing(abc.ABC):
    """A way to store a projection [rows, columns]."""

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Layout of the decoded weight."""

    @property
    @abc.abstractmethod
    def main(self) -> str:
        """End of the name of the tensor that only this packing has."""

    @abc.abstractmethod
    def parts(self, rows: Shard, columns: Shard) -> dict[str, Part]:
        """Return the tensors to read for a part of the projection, by the ends of their names."""

    @abc.abstractmethod
    def decode(self, parts: Parts, rows: Shard, columns: Shard) -> Decoded:
        """Return a part of the projection from the tensors of `parts`. Optional ones may lack.

        Raises ValueError if they do not agree."""


def divided(shard: Shard, by: int, times: int = 1) -> Shard:
    """Return the shard in units of `by / times` entries. Raises ConfigError if it splits one."""
    ends = (shard.total, shard.begin, shard.count)
    if any(end * times % by for end in ends):
        raise ConfigError(
            f"A part of {shard.count} of {shard.total} features is no multiple of {by // times}, "
            f"the unit of the checkpoint's weights. Use another --tensor-parallel-size.",
            param="tensor_parallel_size",
        )
    return type(shard)(*(end * times // by for end in ends))


def integers(
    bits: int, group: int, scale_type: str, *, is_symmetric: bool, has_order: bool = False
) -> Layout:
    """Return the layout of integers with a zero point for each group, unless they are symmetric."""
    return Layout(
        Kind.INTEGERS,
        bits,
        group,
        scale_type=scale_type,
        offset_type="" if is_symmetric else "float32",
        has_order=has_order,
    )


def groups_of(columns: Shard, size: int, *, has_order: bool = False) -> Shard:
    """Return the groups of some columns; all groups if the columns are not in order.

    `size`: of a group; 0: all columns. Raises ConfigError if a group is cut."""
    if not size:
        return type(columns)(1, 0, 1)
    if has_order:
        return divided(type(columns)(columns.total, 0, columns.total), size)
    return divided(columns, size)


UNUSED = Part("float32", is_optional=True, is_used=False)
SCALE_TYPES = {"F16": "float16", "BF16": "bfloat16"}


def scale_type(header: Header, name: str, default: str = "float16") -> str:
    """Return the type of a checkpoint's scales; `default` if it is not known."""
    return SCALE_TYPES.get(header[name].kind, "float32") if name in header else default
