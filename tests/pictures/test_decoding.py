"""Pictures of all kinds, decoded by workers."""

from __future__ import annotations

import base64
import gzip
import io
import re

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.pictures.running import workers_of
from tests.pictures.samples import (
    FILES,
    QWEN,
    as_file,
    data_url,
    frames,
    gradient,
    png_header,
    rotated,
    saved,
    tiff_with_a_tile,
)
from tests.server import until
from toolkit.errors import InvalidRequestError
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits
from toolkit.pictures.sources import Encoded, from_image, load


def opened(data: bytes) -> Image.Image:
    """Return the picture as Transformers reads it, transparency over white."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def reference(image: Image.Image) -> tuple[list[int], np.ndarray]:
    """Return (grid, values of the first frame) as Transformers computes them."""
    import transformers  # noqa: F401  (with PyTorch, before anything else imports it)
    from transformers.image_transforms import convert_to_rgb
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

    processor = module.Qwen2VLImageProcessorPil(**QWEN.fields)
    found = processor([Image.fromarray(convert_to_rgb(image, return_numpy=True))])
    values = found["pixel_values"].reshape(-1, 3, 2, 14 * 14)
    assert np.array_equal(values[:, :, 0], values[:, :, 1])
    return list(found["image_grid_thw"][0]), values[:, :, 0]


def normalized(data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Compute what the device does with the integers."""
    values = np.frombuffer(data, np.uint8).reshape(shape[0], 3, -1).astype(np.float64)
    mean, std = (np.array(one)[:, None] for one in (QWEN.mean, QWEN.std))
    return (values * QWEN.rescale_factor - mean) / std


def problem(pool: PicturePool, encoded: Encoded | bytes) -> str:
    """Return the message of the error, which is the same for size and pixels."""
    encoded = as_file(encoded) if isinstance(encoded, bytes) else encoded
    with pytest.raises(InvalidRequestError) as caught:
        pool.process(encoded, "here").result(30)
    assert caught.value.param == "here"
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("kind", FILES)
def test_values_are_those_of_transformers(pool: PicturePool, kind: str) -> None:
    data = FILES[kind]()
    try:
        image = opened(data)
    except Exception:
        assert kind == "jpeg with broken exif"
        image = Image.open(io.BytesIO(data))
    found = pool.process(as_file(data), "here").result(30)
    grid, values = reference(image)
    assert (found.width, found.height) == image.size
    assert list(found.grid) == grid
    assert found.dtype == "uint8"
    assert np.abs(normalized(found.data, found.shape) - values).max() < 1e-6


@pytest.mark.parametrize("kind", FILES)
def test_measured_size_is_that_of_the_pixels(pool: PicturePool, kind: str) -> None:
    encoded = as_file(FILES[kind]())
    found = pool.process(encoded, "here").result(30)
    assert pool.measure(encoded, "here").result(30) == (found.width, found.height)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "1", "P", "CMYK", "I", "F", "I;16"])
def test_pillow_images_have_the_values_of_files(pool: PicturePool, mode: str) -> None:
    image = gradient(50, 30, "RGBA").convert("L" if mode == "I;16" else mode).convert(mode)
    encoded = from_image(image)
    found = pool.process(encoded, "here").result(30)
    grid, values = reference(image)
    assert pool.measure(encoded, "here").result(30) == (50, 30)
    assert list(found.grid) == grid
    assert np.abs(normalized(found.data, found.shape) - values).max() < 1e-6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pillow_images_are_turned_like_files(pool: PicturePool, orientation: int) -> None:
    data = rotated(orientation)
    from_file = pool.process(as_file(data), "here").result(30)
    assert pool.process(from_image(Image.open(io.BytesIO(data))), "here").result(30) == from_file


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is an empty file"),
        (b"hello, world; this is text", r"first bytes are 'hello, world; th'; PNG, JPEG, WebP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "first bytes are '%!PS-Adobe"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is not a picture that can be read"),
        (data_url(saved(gradient(4, 4))).encode(), "first bytes are 'data:image/png;b'"),
        (gzip.compress(saved(gradient(4, 4)), mtime=0), "is not a picture that can be read"),
        (saved(gradient(9, 9), "PPM"), "is not a picture that can be read"),
        (saved(gradient(9, 9), "ICO"), "is not a picture that can be read"),
        (saved(gradient(9, 9), "PDF"), "first bytes are '%PDF"),
        (saved(gradient(3, 900)), "3 x 900 pixels: the longer side may be at most 200 times"),
    ],
    ids=["empty", "text", "EPS", "SVG", "data URL", "gzip", "PPM", "ICO", "PDF", "long"],
)
def test_what_is_no_picture_is_an_error(pool: PicturePool, data: bytes, words: str) -> None:
    assert re.search(words, problem(pool, data))


@pytest.mark.parametrize("kind", sorted(FILES.keys() - {"one pixel", "one row"}))
def test_truncated_file_is_an_error(pool: PicturePool, kind: str) -> None:
    data = FILES[kind]()
    share = 0.2 if kind == "mpo" or "moving" in kind else 0.6  # of its frames, the first counts
    message = problem(pool, data[: int(len(data) * share)])
    assert "truncated or damaged" in message or "is not a picture" in message


def test_truncated_jpeg_names_what_it_is(pool: PicturePool) -> None:
    data = saved(gradient(300, 200), "JPEG", quality=95)
    assert problem(pool, data[: len(data) // 2]) == (
        "here is a JPEG file of 300 x 200 pixels that is truncated or damaged: only a part of them "
        "can be decoded"
    )


@pytest.mark.parametrize("width", [60_000, 8001])
def test_pixel_bomb_is_refused_by_its_header(pool: PicturePool, width: int) -> None:
    bomb = as_file(png_header(width, width))
    message = problem(pool, bomb)
    assert f"is a picture of {width} x {width} pixels; at most 64,000,000 are allowed" in message
    with pytest.raises(InvalidRequestError, match="at most 64,000,000"):
        pool.measure(bomb, "here").result(30)


@pytest.mark.parametrize("where", ["screen", "frame"])
def test_large_gif_is_refused_by_its_header(pool: PicturePool, where: str) -> None:
    data = bytearray(saved(gradient(16, 16), "GIF"))
    start = 6 if where == "screen" else data.index(b",\0\0\0\0\x10\0\x10\0") + 5
    data[start : start + 4] = b"\xff\xff\xff\xff"
    assert "65535 x 65535 pixels" in problem(pool, bytes(data))


def test_large_webp_is_refused_by_its_header(pool: PicturePool) -> None:
    data = bytearray(saved(gradient(16, 16), "WEBP", lossless=True))
    data[21:25] = (int.from_bytes(data[21:25], "little") | 0xFFFFFFF).to_bytes(4, "little")
    assert "more than 64,000,000 pixels" in problem(pool, bytes(data))


def test_tile_that_is_larger_than_the_picture_is_an_error(pool: PicturePool) -> None:
    assert "truncated or damaged" in problem(pool, tiff_with_a_tile(2**16))


@pytest.mark.parametrize("format", ["GIF", "PNG", "MPO"])
def test_only_the_first_frame_is_decoded(pool: PicturePool, format: str) -> None:
    expected = pool.process(as_file(frames(format, 1)), "here").result(30)
    data = frames(format)
    assert pool.process(as_file(data), "here").result(30) == expected
    if format != "PNG":  # whose frames say where they belong
        without_the_last = data[: len(data) * 6 // 10]
        assert pool.process(as_file(without_the_last), "here").result(30) == expected


def test_memory_of_a_large_picture_is_given_back(pool: PicturePool) -> None:
    large = as_file(saved(Image.new("L", (8000, 8000), 200), compress_level=1))
    assert len(large.data) < 2**20
    before = sum(one.memory_info().rss for one in workers_of(pool))
    assert pool.process(large, "here").result(60).width == 8000
    until(lambda: sum(one.memory_info().rss for one in workers_of(pool)) < before + 2**27)


def test_processes_have_no_pytorch(pool: PicturePool) -> None:
    pool.wait_ready()
    assert psutil.Process(pool.zygote_pid).memory_info().rss < 150 * 2**20


def base64_of(text: str) -> Encoded:
    return Encoded(text, b"")


PLAIN = base64.b64encode(saved(gradient(30, 30))).decode()


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.rstrip("="),
        "\r\n".join(re.findall(".{1,76}", PLAIN)),
        f" \t{PLAIN}\n",
        PLAIN.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    ],
    ids=["plain", "unpadded", "lines", "spaces", "escaped"],
)
def test_base64_is_read_as_browsers_do(pool: PicturePool, text: str) -> None:
    assert pool.measure(base64_of(text), "here").result(30) == (30, 30)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PLAIN[:9] + "*" + PLAIN[10:], r"is not valid base64: it has '\*' at position 9"),
        (PLAIN[:9] + "-" + PLAIN[10:], "it has '-' at position 9"),
        (PLAIN[:9] + "\0" + PLAIN[10:], r"it has '\\x00' at position 9"),
        (PLAIN[:9] + "é" + PLAIN[10:], r"it has '\\xc3' at position 9"),
        (PLAIN[:9] + "=" + PLAIN[10:], "it has '=' at position 9"),
        ("AAAAA", "it has 5 characters and 0 '=' at the end"),
        ("AAAA==", "it has 4 characters and 2 '=' at the end"),
        ("A===", "it has 1 characters and 3 '=' at the end"),
        ("", "is an empty file"),
    ],
)
def test_wrong_base64_is_an_error(pool: PicturePool, text: str, words: str) -> None:
    assert re.search(words, problem(pool, base64_of(text)))


def test_decoded_base64_is_limited(pool: PicturePool) -> None:
    text = "A" * ((PictureLimits().max_bytes // 3 + 1) * 4)
    assert "bytes; at most 33,554,432 are allowed" in problem(pool, base64_of(text))


async def test_data_url_is_decoded(pool: PicturePool) -> None:
    encoded = await load(data_url(saved(gradient(33, 44))), PictureLimits(), "here")
    assert pool.measure(encoded, "here").result(30) == (33, 44)
