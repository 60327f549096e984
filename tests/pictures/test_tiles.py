"""Pictures that are split into tiles: values, counts and tokens equal Transformers'."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.pictures.samples import gradient
from tests.references import FOLDER
from toolkit.errors import CheckpointError
from toolkit.pictures.decoding import PictureError
from toolkit.pictures.families import find_family
from toolkit.pictures.processor import PictureProcessor
from toolkit.pictures.settings import ProcessorSettings, read_processor
from toolkit.pictures.tokens import PictureTokens, find_tokens

PLACEHOLDER = 7
FAKE = "<fake_token_around_image>"
PATCH, MERGE = 3, 2
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "idefics3",
        "Idefics3",
        {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 19}},
    ),
    (
        "idefics3",
        "Idefics3",
        {"size": {"longest_edge": 49}, "max_image_size": {"longest_edge": 49}},
    ),
    ("idefics3", "Idefics3", {"max_image_size": {"longest_edge": 20}, "do_image_splitting": False}),
    (
        "smolvlm",
        "SmolVLM",
        {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": 48}, "resample": 2},
    ),
]
SIZES = [(1, 1), (19, 19), (20, 19), (137, 91), (75, 301), (700, 640), (49, 2), (3, 150), (301, 9)]


def settings_of(folder: Path, name: str, fields: dict[str, Any]) -> ProcessorSettings:
    given = {"image_processor_type": f"{name}ImageProcessor"} | fields
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    family = "internvl" if name == "GotOcr2" else "idefics3"
    return read_processor(folder, family, {}, patch_size=PATCH, merge=MERGE)


def reference(module: str, name: str, fields: dict[str, Any]) -> Any:
    path = f"transformers.models.{module}.image_processing_pil_{module}"
    return getattr(importlib.import_module(path), f"{name}ImageProcessorPil")(**fields)


def tokenizer(folder: Path, *tokens: str) -> Tokenizer:
    """Write a tokenizer of bytes with these tokens added, and return it."""
    made = Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json"))
    made.add_special_tokens([*tokens, "<image>"])
    made.save(str(folder / "tokenizer.json"))
    return made


def written_ids(made: Tokenizer, fake: str, count: int, rows: int, columns: int) -> list[int]:
    """Return the tokens of a picture that Transformers writes for these rows and columns."""
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    texts = SimpleNamespace(
        fake_image_token=fake,
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=count,
    )
    text = Idefics3Processor.replace_image_token(texts, {"rows": [[rows]], "cols": [[columns]]}, 0)
    ids = made.encode(text).ids
    return [PLACEHOLDER if one == made.token_to_id("<image>") else one for one in ids]


@pytest.mark.parametrize(("module", "name", "fields"), CASES)
def test_tiles_are_those_of_transformers(
    tmp_path: Path, module: str, name: str, fields: dict[str, Any]
) -> None:
    settings, family = settings_of(tmp_path, name, fields), find_family("idefics3")
    made = tokenizer(tmp_path, FAKE)
    tokens = find_tokens(tmp_path, settings, PLACEHOLDER, 0)
    processor, theirs = PictureProcessor(settings), reference(module, name, fields)
    count = family.tile_grid(settings)[0] ** 2
    for size in SIZES:
        image = gradient(*size)
        if family.refusal(settings, *size):
            with pytest.raises(ValueError, match="size must be"):
                theirs([image])
            continue
        grid, array = processor.process(image)
        found = theirs([image], return_row_col_info=True)
        (expected,) = found["pixel_values"]
        ids = tokens.ids(family.token_grid(settings, *size))
        assert ids == written_ids(made, FAKE, count, found["rows"][0][0], found["cols"][0][0])
        assert ids.count(PLACEHOLDER) == len(expected) * count
        assert ids.count(PLACEHOLDER) <= tokens.num_rows(family.largest_grid(settings))
        assert len(array) == np.prod(grid) == len(expected) * count * MERGE**2
        tiles = as_tiles(array, settings, len(expected))
        side = tiles.shape[-1]
        assert np.abs(tiles - np.stack(list(expected))[:, :, :side, :side]).max() < 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {"size": {"height": 19, "width": 19}},
        {"size": {"height": 30, "width": 30}, "max_patches": 5, "min_patches": 3, "resample": 2},
        {"size": {"height": 30, "width": 30}, "max_patches": 1},
    ],
)
def test_tiles_of_internvl_are_those_of_transformers(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Their number follows from the picture's shape, and there is one of all of it."""
    settings = settings_of(tmp_path, "GotOcr2", fields | {"crop_to_patches": False})
    made, family = tokenizer(tmp_path, "<img>", "</img>"), find_family("internvl")
    begin, end = (made.token_to_id(text) for text in ("<img>", "</img>"))
    tokens = find_tokens(tmp_path, settings, PLACEHOLDER, 0)
    processor = PictureProcessor(settings)
    theirs = reference("got_ocr2", "GotOcr2", fields | {"crop_to_patches": True})
    count = family.tile_grid(settings)[0] ** 2
    for size in SIZES:
        image = gradient(*size)
        _, array = processor.process(image)
        found = theirs([image])
        expected = np.stack(list(found["pixel_values"]))
        ids = tokens.ids(family.token_grid(settings, *size))
        assert ids == [begin, *[PLACEHOLDER] * (count * found["num_patches"][0]), end]
        assert ids.count(PLACEHOLDER) <= tokens.num_rows(family.largest_grid(settings))
        tiles = as_tiles(array, settings, len(expected))
        side = tiles.shape[-1]
        assert np.abs(tiles - expected[:, :, :side, :side]).max() < 1e-5


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 1), (2, 6), (4, 9), (3, 2)])
def test_counts_of_internvl_follow_from_sizes(tmp_path: Path, fewest: int, most: int) -> None:
    fields = {"size": {"height": 30, "width": 30}, "min_patches": fewest, "max_patches": most}
    settings, family = settings_of(tmp_path, "GotOcr2", fields), find_family("internvl")
    theirs = reference("got_ocr2", "GotOcr2", fields | {"crop_to_patches": True})
    tokenizer(tmp_path, "<img>", "</img>")
    tokens = find_tokens(tmp_path, settings, PLACEHOLDER, 0)
    largest = tokens.num_rows(family.largest_grid(settings))
    found = set()
    for width in range(1, 400, 7):
        for height in (*range(1, 130, 5), 30, 60, 90, 1000):
            found.add(tokens.num_rows(family.token_grid(settings, width, height)))
            number = theirs.get_number_of_image_patches(height, width)
            assert tokens.num_rows(family.token_grid(settings, width, height)) == 25 * number
    assert max(found) == largest


def as_tiles(patches: np.ndarray, settings: ProcessorSettings, count: int) -> np.ndarray:
    """Return patches put together and normalized: [tiles, channels, height, width]."""
    side = round((len(patches) / count) ** 0.5)
    parts = patches.reshape(count, side // MERGE, side // MERGE, MERGE, MERGE, 3, PATCH, PATCH)
    tiles = parts.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(count, 3, side * PATCH, side * PATCH)
    mean, std = (np.reshape(one, (3, 1, 1)) for one in (settings.mean, settings.std))
    return (tiles.astype(np.float64) * settings.rescale_factor - mean) / std


@pytest.mark.parametrize(
    ("module", "name"), [("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"), ("got_ocr2", "GotOcr2")]
)
def test_defaults_and_options_exist_in_transformers(tmp_path: Path, module: str, name: str) -> None:
    found, theirs = settings_of(tmp_path, name, {}), reference(module, name, {})
    assert theirs.valid_kwargs.__annotations__.keys() >= find_family(found.family).OPTIONS
    for field, value in found.fields.items():
        expected = getattr(theirs, field)
        assert type(value)(expected) == value


@pytest.mark.parametrize("longest", [49, 60, 364, 1456, 2048, 5000])
def test_counts_of_tiles_follow_from_sizes(tmp_path: Path, longest: int) -> None:
    fields = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 49}}
    settings, family = settings_of(tmp_path, "Idefics3", fields), find_family("idefics3")
    theirs = Sizes(longest)
    for width in [*range(1, 90, 3), 333, 1456, 3001]:
        for height in (1, 2, 7, 16, 31, 49, 50, 98, 147, 640, 1455, 2048):
            if family.refusal(settings, width, height):
                continue
            rows, columns = family.token_grid(settings, width, height)
            assert (rows // 8, columns // 8) == theirs.tiles(width, height), (width, height)


class Sizes:
    """Transformers' image processor, for pictures without pixels."""

    def __init__(self, longest: int) -> None:
        fields = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 49}}
        made = reference("idefics3", "Idefics3", fields)
        module = importlib.import_module(type(made).__module__)
        self._made, self._size = made, made.size
        self._output_size = module.get_resize_output_image_size

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles."""
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        size = self._output_size(image, self._size.longest_edge)
        resized: list[tuple[int, int]] = []

        def resize(image: Any, size: Any, resample: Any = None) -> None:
            resized.append((size.height, size.width))

        self._made.resize = resize
        self._made.resize_for_vision_encoder(np.broadcast_to(np.uint8(0), (3, *size)), 49)
        return resized[0][0] // 49, resized[0][1] // 49


def test_tokens_around_tiles_may_be_added_or_text(tmp_path: Path) -> None:
    fields = {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 20}}
    settings = settings_of(tmp_path, "Idefics3", fields)
    cells = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    for more in ((), ("<global-img>",), ("<global-img>", *cells)):
        for fake in (FAKE, "<around>"):
            names = {} if fake == FAKE else {"fake_image_token": fake}
            extra = {"extra_special_tokens": names}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(names or extra))
            made = tokenizer(tmp_path, fake, *more)
            found = find_tokens(tmp_path, settings, PLACEHOLDER, 0)
            for rows, columns in ((1, 2), (2, 1), (2, 3), (3, 3)):
                expected = written_ids(made, fake, 9, rows, columns)
                assert found.ids((3 * rows, 3 * columns)) == expected
            assert found.ids((3, 3)) == written_ids(made, fake, 9, 0, 0)


def test_runs_of_placeholders_are_tiles(tmp_path: Path) -> None:
    fields = {"size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 20}}
    settings = settings_of(tmp_path, "Idefics3", fields)
    tokenizer(tmp_path, FAKE, "<global-img>", "<row_1_col_1>", "<row_1_col_2>")
    found: PictureTokens = find_tokens(tmp_path, settings, PLACEHOLDER, 0)
    assert found.runs((3, 6), 100) == ((102, 9), (113, 9), (126, 9))
    assert found.num_rows((3, 6)) == 27


def test_missing_tokens_are_errors(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "Idefics3", {})
    tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=f"has no token '{FAKE}', which prompts with pic"):
        find_tokens(tmp_path, settings, PLACEHOLDER, 0)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"5": {"content": FAKE}}})
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        find_tokens(tmp_path, settings, PLACEHOLDER, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_resize": False}, "do_resize is false"),
        ({"size": {"height": 30, "width": 36}}, "and tk supports an equal height and width"),
        ({"size": {"shortest_edge": 30}}, "and tk supports an equal height and width"),
        ({"max_patches": 0}, "max_patches is 0, which must be a number from 1 on"),
        ({"size": {"height": 9, "width": 9}}, "9 pixels has 3 patches on a side, which must be a"),
    ],
)
def test_other_settings_of_internvl_are_problems(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    settings = settings_of(tmp_path, "GotOcr2", fields)
    assert words in find_family("internvl").problem(settings)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_resize": False}, "do_resize is false"),
        ({"size": {"height": 9, "width": 9}}, "size is {'height': 9, 'width': 9}, and tk supports"),
        ({"max_image_size": 9}, "max_image_size is 9, and tk supports"),
        ({"max_image_size": {"longest_edge": 5}}, "a tile of 5 pixels has 1 patches on a"),
        ({"max_image_size": {"longest_edge": 2}}, "2 pixels has 0 patches on a side, which must"),
    ],
)
def test_other_settings_are_problems(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    settings = settings_of(tmp_path, "Idefics3", fields)
    assert words in find_family("idefics3").problem(settings)


def test_narrow_pictures_are_refused(tmp_path: Path) -> None:
    fields = {"size": {"longest_edge": 49}, "max_image_size": {"longest_edge": 49}}
    processor = PictureProcessor(settings_of(tmp_path, "Idefics3", fields))
    with pytest.raises(PictureError, match="less than a pixel wide once it is resized"):
        processor.process(gradient(1, 4900))
