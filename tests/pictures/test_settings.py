"""Image processors of checkpoints, and their values against Transformers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.pictures.samples import CLIP_MEAN, CLIP_STD, QWEN, gradient
from toolkit.errors import CheckpointError, ConfigError
from toolkit.pictures.decoding import PictureError
from toolkit.pictures.families import find_family
from toolkit.pictures.processor import PictureProcessor
from toolkit.pictures.settings import ProcessorSettings, read_processor

NAMES = {
    "qwen2_vl": "Qwen2VLImageProcessor",
    "clip": "CLIPImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "pixtral": "PixtralImageProcessor",
}


def checkpoint(folder: Path, file: str = "preprocessor_config.json", **fields: Any) -> Path:
    (folder / file).write_text(json.dumps(fields))
    return folder


def read(
    folder: Path, family: str = "qwen2_vl", sides: tuple[int, int] = (14, 2), **overrides: Any
) -> ProcessorSettings:
    """sides: pixels of a patch, and patches of a token."""
    return read_processor(folder, family, overrides, patch_size=sides[0], merge=sides[1])


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
def test_suffixes_name_the_same_class(tmp_path: Path, suffix: str) -> None:
    checkpoint(tmp_path, image_processor_type=f"Qwen2VLImageProcessor{suffix}")
    assert read(tmp_path).name == "Qwen2VLImageProcessor"


def test_old_and_missing_names_are_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, feature_extractor_type="CLIPFeatureExtractor")
    assert read(tmp_path, "clip").name == "CLIPImageProcessor"
    checkpoint(tmp_path, do_resize=True)
    assert read(tmp_path, "clip").name == "CLIPImageProcessor"


def test_nested_settings_are_read(tmp_path: Path) -> None:
    inner = {"image_processor_type": "Qwen2VLImageProcessorFast", "merge_size": 3}
    checkpoint(tmp_path, "processor_config.json", image_processor=inner)
    assert read(tmp_path).fields["merge_size"] == 3
    checkpoint(tmp_path, merge_size=4)
    assert read(tmp_path).fields["merge_size"] == 4


@pytest.mark.parametrize(
    ("fields", "edges"),
    [
        ({}, (3136, 1003520)),
        ({"min_pixels": 1, "max_pixels": 2}, (1, 2)),
        ({"max_pixels": 2}, (3136, 2)),
        ({"size": {"min_pixels": 1, "max_pixels": 2}}, (1, 2)),
        ({"min_pixels": 1, "size": {"shortest_edge": 3, "longest_edge": 4}}, (1, 4)),
        ({"size": {"shortest_edge": 3, "longest_edge": 4}}, (3, 4)),
        ({"size": None}, (3136, 1003520)),
    ],
)
def test_old_limits_of_pixels_are_converted(
    tmp_path: Path, fields: dict[str, Any], edges: tuple[int, int]
) -> None:
    found = read(checkpoint(tmp_path, **fields)).fields
    assert found["size"] == {"shortest_edge": edges[0], "longest_edge": edges[1]}
    assert not {"min_pixels", "max_pixels"} & found.keys()


def test_override_of_another_kind_replaces_the_size(tmp_path: Path) -> None:
    checkpoint(tmp_path, size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
    found = read(tmp_path, "clip", size={"height": 30, "width": 40}, crop_size={"height": 20})
    assert found.fields["size"] == {"height": 30, "width": 40}
    assert found.fields["crop_size"] == {"height": 20, "width": 224}


@pytest.mark.parametrize(
    "overrides",
    [{"max_pixels": 500}, {"size": {"longest_edge": 500}}, {"size": {"max_pixels": 500}}],
)
def test_overrides_win(tmp_path: Path, overrides: dict[str, Any]) -> None:
    checkpoint(tmp_path, min_pixels=100, max_pixels=200, size={"longest_edge": 300})
    assert read(tmp_path, **overrides).fields["size"] == {"shortest_edge": 100, "longest_edge": 500}


def test_unknown_override_is_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"has 'max_pixel', which Qwen.* mean max_pixels\?"):
        read(tmp_path, max_pixel=3)


def test_other_fields_are_ignored(tmp_path: Path) -> None:
    checkpoint(tmp_path, processor_class="X", auto_map={"a": "b"}, preprocess=1, patch_size=16)
    assert read(tmp_path).fields.keys() == {
        "do_normalize", "do_rescale", "image_mean", "image_std", "patch_size", "rescale_factor",
        "size",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{}", "has no image processor"),
        ("preprocessor_config.json", "{", "cannot be read"),
        ("preprocessor_config.json", "[]", "must be a JSON object"),
        ("processor_config.json", "{}", "has no image processor"),
        ("processor_config.json", '{"image_processor": 1}', "has no image processor"),
        (
            "preprocessor_config.json",
            '{"image_processor_type": "ViTImageProcessor"}',
            "names the image processor 'ViTImageProcessor'. This model's pictures are supported "
            "with Qwen2VLImageProcessor",
        ),
        ("preprocessor_config.json", '{"image_mean": [0, 1]}', "image_mean must be a number or"),
        ("preprocessor_config.json", '{"image_std": "x"}', "image_std must be a number or three"),
        ("preprocessor_config.json", '{"image_std": [1, 1, 0]}', "image_std must not be 0"),
        ("preprocessor_config.json", '{"rescale_factor": true}', "rescale_factor must be a number"),
        ("preprocessor_config.json", '{"size": 3}', "size must be an object"),
    ],
)
def test_wrong_file_is_an_error(tmp_path: Path, file: str, content: str, words: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "mean", "std", "factor"),
    [
        ({}, CLIP_MEAN, CLIP_STD, 1 / 255),
        ({"image_mean": 0.5, "image_std": [1, 2, 3]}, [0.5] * 3, [1, 2, 3], 1 / 255),
        ({"do_normalize": False, "rescale_factor": 0.5}, [0] * 3, [1] * 3, 0.5),
        ({"do_rescale": False}, CLIP_MEAN, CLIP_STD, 1),
    ],
)
def test_device_gets_mean_std_and_factor(
    tmp_path: Path, fields: dict[str, Any], mean: list[float], std: list[float], factor: float
) -> None:
    found = read(checkpoint(tmp_path, **fields))
    assert (found.mean, found.std) == (tuple(mean), tuple(std))
    assert found.rescale_factor == factor


def test_settings_are_messages(tmp_path: Path) -> None:
    found = read(checkpoint(tmp_path, min_pixels=3))
    encoded = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.decode(encoded, type=ProcessorSettings) == found


def transformers_class(family: str, name: str) -> Any:
    module = find_family(family).PROCESSORS[name]
    path = f"transformers.models.{module}.image_processing_pil_{module}"
    return getattr(importlib.import_module(path), f"{name}Pil")


@pytest.mark.parametrize("family", NAMES)
def test_defaults_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    found = read(checkpoint(tmp_path), family)
    reference = transformers_class(family, found.name)()
    assert found.name == NAMES[family]
    for name in ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize"):
        ours, theirs = found.fields[name], getattr(reference, name)
        assert tuple(ours) == tuple(theirs) if isinstance(ours, list) else ours == theirs
    assert family != "qwen2_vl" or found.fields["size"] == dict(reference.size)


@pytest.mark.parametrize("family", NAMES)
def test_options_exist_in_transformers(family: str) -> None:
    names = transformers_class(family, NAMES[family]).valid_kwargs.__annotations__
    assert names.keys() >= find_family(family).OPTIONS


def as_picture(
    patches: np.ndarray, picture: np.ndarray, settings: ProcessorSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return patches put together, and what they are of: pictures [1, 3, height, width]."""
    size, merge = settings.patch_size, settings.merge
    rows, columns = (n // (size * merge) for n in picture.shape[2:])
    parts = patches.reshape(rows, columns, merge, merge, 3, size, size)
    whole = parts.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * merge * size, -1)
    return whole, picture[:, :, : whole.shape[2], : whole.shape[3]]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_vl", {}),
    ("qwen2_vl", {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    ("qwen2_vl", {"max_pixels": 50_000, "merge_size": 1, "temporal_patch_size": 1}),
    ("qwen2_vl", {"do_normalize": False, "do_rescale": False}),
    ("clip", {}),
    ("clip", {"size": 336, "crop_size": 336}),
    ("clip", {"do_center_crop": False, "size": {"height": 50, "width": 70}, "resample": 2}),
    ("clip", {"do_resize": False, "crop_size": {"height": 100, "width": 90}}),
    (
        "clip",
        {
            "do_center_crop": False,
            "size": {"height": 50, "width": 70},
            "do_pad": True,
            "pad_size": {"height": 60, "width": 80},
        },
    ),
    ("gemma3", {}),
    ("gemma3", {"size": {"height": 896, "width": 896}}),
    ("pixtral", {}),
    ("pixtral", {"size": {"longest_edge": 154}}),
    ("pixtral", {"size": {"height": 110, "width": 300}}),
]
SIZES = [(1, 1), (3, 2), (137, 91), (224, 224), (75, 301), (700, 640)]


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_values_are_those_of_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    sides = fields.get("patch_size", 14), fields.get("merge_size", 2)
    settings = read(checkpoint(tmp_path, **fields), family, sides)
    processor, module = PictureProcessor(settings), find_family(family)
    sizes = fields | ({"patch_size": 28} if family == "pixtral" else {})
    reference = transformers_class(family, NAMES[family])(**sizes)
    for size in SIZES:
        image = gradient(*size)
        grid, array = processor.process(image)
        found = reference([image])
        expected = np.stack(list(found["pixel_values"]))
        assert array.flags.c_contiguous
        if family != "qwen2_vl":
            array, expected = as_picture(array, expected, settings)
        if not module.problem(settings):
            merge = settings.merge
            assert module.token_grid(settings, *size) == tuple(n // merge for n in grid[-2:])
        if settings.sends_floats:
            assert settings.mean is settings.std is settings.rescale_factor is None
            assert array.dtype == np.float32
            assert np.array_equal(array, expected)
            continue
        assert array.dtype == np.uint8
        if family == "qwen2_vl":
            assert list(grid) == list(found["image_grid_thw"][0])
            patch = settings.fields.get("patch_size", 14)
            expected = expected.reshape(len(array), 3, -1, patch * patch)[:, :, 0]
            array = array.reshape(expected.shape)
        else:
            assert grid == (array.shape[2] // 14, array.shape[3] // 14)
        channels = (1, 3, *[1] * (array.ndim - 2))
        mean, std = (np.reshape(one, channels) for one in (settings.mean, settings.std))
        assert array.shape == expected.shape
        values = (array.astype(np.float64) * settings.rescale_factor - mean) / std
        assert np.abs(values - expected).max() <= 1e-6 * max(1, np.abs(expected).max())


def test_values_that_are_no_integers_are_noticed(tmp_path: Path) -> None:
    family = find_family("qwen2_vl")
    grid = np.array([[1, 1, 1]])
    for value in (0.5, 256.0, -1.0):
        outputs = {"image_grid_thw": grid, "pixel_values": np.full((1, 3), value, np.float32)}
        with pytest.raises(ValueError, match="integers from 0 to 255"):
            family.pack(QWEN, outputs)


def test_picture_that_the_processor_refuses_is_an_error(tmp_path: Path) -> None:
    processor = PictureProcessor(read(checkpoint(tmp_path)))
    with pytest.raises(PictureError, match="at most 200 times"):
        processor.process(Image.new("RGB", (1, 201)))
    assert processor.process(Image.new("RGB", (1, 200)))
