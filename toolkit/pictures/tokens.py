"""Tokens that stand for a picture in a prompt. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from toolkit.errors import CheckpointError
from toolkit.files import read_json
from toolkit.pictures.families import Grid, find_family

JOINT = "\n\n"
"""Text before and after a picture's frame."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens around a picture's placeholders. Prompts may have `start` for all of them.

    As Transformers' Gemma3Processor, which replaces it in the text."""

    start: int
    end: int
    count: int  # placeholders of every picture
    joint: tuple[int, ...]  # tokens of JOINT; empty if the tokenizer has none for it

    @property
    def before(self) -> tuple[int, ...]:
        return *self.joint, self.start

    @property
    def after(self) -> tuple[int, ...]:
        return self.end, *self.joint


class PictureTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of pictures: placeholders, and what separates rows of them."""

    placeholder: int  # stands for a row of a picture's features
    first: int = 0  # placeholders before those of the grid
    row_end: int | None = None  # after each row of the grid
    end: int | None = None  # after the last row, instead
    frame: Frame | None = None

    @property
    def place(self) -> int:
        """Token that stands for a picture in a conversation."""
        return self.placeholder if self.frame is None else self.frame.start

    def num_rows(self, grid: Grid) -> int:
        """Return the number of placeholders."""
        return self.first + grid[0] * grid[1]

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of a picture."""
        rows, columns = grid
        if self.row_end is None or self.end is None:
            return [self.placeholder] * self.num_rows(grid)
        row = [self.placeholder] * columns
        before = [self.placeholder] * self.first
        return [*before, *[*row, self.row_end] * (rows - 1), *row, self.end]

    def runs(self, grid: Grid, start: int) -> tuple[tuple[int, int], ...]:
        """Return (position, number) of the runs of placeholders of a picture from `start` on."""
        rows, columns = grid
        if self.row_end is None:
            return ((start, self.num_rows(grid)),)
        step = columns + 1
        others = ((start + self.first + row * step, columns) for row in range(1, rows))
        return ((start, self.first + columns), *others)


def find_tokens(folder: Path, family: str, placeholder: int, first: int) -> PictureTokens:
    """Return the tokens of a checkpoint's pictures. Raises CheckpointError."""
    ends = find_family(family).ENDS
    if not ends:
        return PictureTokens(placeholder=placeholder, first=first)
    given = _object(folder / "processor_config.json")
    texts = [str(given.get(name) or default) for name, default in ends.items()]
    known = _added_tokens(folder)
    if missing := [text for text in texts if text not in known]:
        raise CheckpointError(
            f"{folder}: the tokenizer has no token {' and '.join(map(repr, missing))}, which "
            "prompts with pictures need."
        )
    row_end, end = (known[text] for text in texts)
    return PictureTokens(placeholder=placeholder, first=first, row_end=row_end, end=end)


def find_frame(folder: Path, marks: tuple[int, int], count: int) -> Frame:
    """Return the frame of a checkpoint's pictures. Raises CheckpointError.

    marks: the tokens before and after the `count` placeholders of a picture."""
    joint = _added_tokens(folder).get(JOINT)
    start, end = marks
    return Frame(start=start, end=end, count=count, joint=() if joint is None else (joint,))


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens that are added to a vocabulary, by their text."""
    found: dict[str, int] = {}
    listed = _object(folder / "tokenizer.json").get("added_tokens") or []
    by_id = _object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    try:
        found |= {str(one["content"]): int(id) for id, one in by_id.items()}
        found |= {str(one["content"]): int(one["id"]) for one in listed}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the tokenizer's added tokens cannot be read.") from error
    return found


def _object(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if there is no file."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    return found if isinstance(found, dict) else {}
