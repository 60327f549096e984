"""Tokens that stand for a picture in a prompt. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from toolkit.errors import CheckpointError
from toolkit.files import read_json
from toolkit.pictures.families import Grid, TileTexts, find_family
from toolkit.pictures.settings import ProcessorSettings

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


class TileTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens around the tiles of a picture: those of the picture's rows, and one of all of it.

    A picture of one tile has that alone."""

    grid: Grid  # rows and columns of a tile's placeholders
    start: tuple[int, ...] = ()
    cells: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Tokens before each tile but the last, by row and column of tiles. Empty: none."""
    last: tuple[int, ...] = ()  # before the last tile
    alone: tuple[int, ...] = ()  # before the only tile
    end: tuple[int, ...] = ()

    def ids(self, grid: Grid, placeholder: int) -> list[int]:
        """Return the tokens of a picture."""
        rows, columns = grid[0] // self.grid[0], grid[1] // self.grid[1]
        tile = [placeholder] * (self.grid[0] * self.grid[1])
        if rows * columns == 1:
            return [*self.start, *self.alone, *tile, *self.end]
        found = [*self.start]
        for row in range(rows):
            for column in range(columns):
                found += [*self.cells[row][column], *tile] if self.cells else tile
        return [*found, *self.last, *tile, *self.end]


class PictureTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of pictures: placeholders, and what separates rows or tiles of them."""

    placeholder: int  # stands for a row of a picture's features
    first: int = 0  # placeholders before those of the grid
    row_end: int | None = None  # after each row of the grid
    end: int | None = None  # after the last row, instead
    frame: Frame | None = None
    tiles: TileTokens | None = None

    @property
    def place(self) -> int:
        """Token that stands for a picture in a conversation."""
        return self.placeholder if self.frame is None else self.frame.start

    def num_rows(self, grid: Grid) -> int:
        """Return the number of placeholders."""
        return self.ids(grid).count(self.placeholder)

    def ids(self, grid: Grid) -> list[int]:
        """Return the tokens of a picture."""
        rows, columns = grid
        if self.tiles is not None:
            return self.tiles.ids(grid, self.placeholder)
        if self.row_end is None or self.end is None:
            return [self.placeholder] * (self.first + rows * columns)
        row = [self.placeholder] * columns
        before = [self.placeholder] * self.first
        return [*before, *[*row, self.row_end] * (rows - 1), *row, self.end]

    def runs(self, grid: Grid, start: int) -> tuple[tuple[int, int], ...]:
        """Return (position, number) of the runs of placeholders of a picture from `start` on."""
        is_row = np.array([False, *(one == self.placeholder for one in self.ids(grid)), False])
        begins, ends = np.flatnonzero(is_row[1:] != is_row[:-1]).reshape(-1, 2).T.tolist()
        return tuple((start + begin, end - begin) for begin, end in zip(begins, ends, strict=True))


def find_tokens(
    folder: Path, processor: ProcessorSettings, placeholder: int, first: int
) -> PictureTokens:
    """Return the tokens of a checkpoint's pictures. Raises CheckpointError.

    first: placeholders before those of a grid."""
    family = find_family(processor.family)
    tokens = PictureTokens(placeholder=placeholder, first=first)
    if family.ENDS:
        given = _object(folder / "processor_config.json")
        texts = [str(given.get(name) or default) for name, default in family.ENDS.items()]
        row_end, end = _require_tokens(folder, texts)
        return msgspec.structs.replace(tokens, row_end=row_end, end=end)
    if family.TILES is None:
        return tokens
    grid, most = family.tile_grid(processor), family.largest_grid(processor)
    tiles = _find_tiles(folder, family.TILES, grid, (most[0] // grid[0], most[1] // grid[1]))
    return msgspec.structs.replace(tokens, tiles=tiles)


def _find_tiles(folder: Path, texts: TileTexts, grid: Grid, most: Grid) -> TileTokens:
    """Return the tokens around tiles.

    grid: rows and columns of a tile's tokens; most: rows and columns of tiles."""
    given = _object(folder / "tokenizer_config.json")
    more = given.get("extra_special_tokens")
    given |= more if isinstance(more, dict) else {}
    tokens = {name: str(given.get(name) or default) for name, default in texts.tokens.items()}
    _require_tokens(folder, [*tokens.values()])
    mark, encode = next(iter(tokens.values())), _encoder(folder)

    def ids(text: str, **place: int) -> tuple[int, ...]:
        """Encode text that follows a special token, as it does in prompts."""
        return tuple(encode(mark + text.format_map({**tokens, **place}))[1:])

    def cell(row: int, column: int) -> tuple[int, ...]:
        text = texts.row_end + texts.cell if row and not column else texts.cell
        return ids(text, row=row + 1, column=column + 1)

    rows = range(most[0]) if texts.row_end or texts.cell else ()
    return TileTokens(
        grid=grid,
        start=ids(texts.start),
        cells=tuple(tuple(cell(row, column) for column in range(most[1])) for row in rows),
        last=ids(texts.last),
        alone=ids(texts.alone),
        end=ids(texts.end),
    )


def _encoder(folder: Path) -> Callable[[str], list[int]]:
    """Return a function that encodes text, without tokens at its beginning or end."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises no other type
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from None

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    return encode


def _require_tokens(folder: Path, texts: Sequence[str]) -> list[int]:
    """Return the ids of added tokens. Raises CheckpointError if one is missing."""
    known = _added_tokens(folder)
    if missing := [text for text in texts if text not in known]:
        raise CheckpointError(
            f"{folder}: the tokenizer has no token {' and '.join(map(repr, missing))}, which "
            "prompts with pictures need."
        )
    return [known[text] for text in texts]


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
