"""Pictures of the tests: small files of every kind that a client may send."""

from __future__ import annotations

import base64
import functools
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from toolkit.pictures.settings import ProcessorSettings
from toolkit.pictures.sources import Encoded

GENERAL = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
CLIP = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
QWEN = ProcessorSettings(
    name="Qwen2VLImageProcessor",
    fields=GENERAL | CLIP | {"size": {"shortest_edge": 3136, "longest_edge": 1_000_000}},
    family="qwen2_vl",
)


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture without two equal rows, columns or channels."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [(rows * 7 + columns * 3) % 256, (rows * 5) % 256, (columns * 11) % 256]
    channels.append((rows + columns) * 13 % 256)
    values = np.stack(channels, axis=-1).astype(np.uint8)
    return Image.fromarray(values[..., :3] if mode != "RGBA" else values).convert(mode)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def rotated(orientation: int, format: str = "JPEG", **options: Any) -> bytes:
    """A file of 40 x 24 pixels with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(gradient(40, 24), format, exif=exif, **options)


def sixteen_bits() -> Image.Image:
    return Image.fromarray(np.arange(0, 60_000, 50, dtype=np.uint16).reshape(30, 40))


def cmyk() -> Image.Image:
    return gradient(40, 30, "RGBA").convert("RGB").convert("CMYK")


def palette(transparent: int | None = None) -> bytes:
    image = gradient(40, 30).quantize(16)
    return saved(image, **({} if transparent is None else {"transparency": transparent}))


def frames(format: str, count: int = 3) -> bytes:
    first, *others = [gradient(40 + 0 * n, 30).rotate(90 * n) for n in range(count)]
    return saved(first, format, save_all=True, append_images=others, duration=10)


def late_exif() -> bytes:
    """A PNG file whose EXIF data are behind the pixels."""
    file = rotated(6, "PNG")
    start = file.index(b"eXIf") - 4
    (length,) = struct.unpack(">I", file[start : start + 4])
    chunk = file[start : start + length + 12]
    rest = file[:start] + file[start + length + 12 :]
    end = rest.index(b"IEND") - 4
    return rest[:end] + chunk + rest[end:]


FILES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: saved(gradient(61, 47), "JPEG", quality=90),
    "progressive jpeg": lambda: saved(gradient(61, 47), "JPEG", progressive=True),
    "grey jpeg": lambda: saved(gradient(61, 47, "L"), "JPEG"),
    "cmyk jpeg": lambda: saved(cmyk(), "JPEG"),
    "mpo": lambda: frames("MPO"),
    "png": lambda: saved(gradient(61, 47)),
    "grey png": lambda: saved(gradient(50, 30, "L")),
    "black and white png": lambda: saved(gradient(50, 30, "1")),
    "16-bit png": lambda: saved(sixteen_bits()),
    "palette png": palette,
    "transparent palette png": lambda: palette(3),
    "transparent png": lambda: saved(gradient(50, 30, "RGBA")),
    "transparent grey png": lambda: saved(gradient(50, 30, "RGBA").convert("LA")),
    "rgb with a transparent color": lambda: saved(gradient(50, 30), transparency=(0, 0, 0)),
    "one pixel": lambda: saved(Image.new("RGB", (1, 1), (1, 2, 3))),
    "one row": lambda: saved(gradient(150, 1)),
    "gif": lambda: saved(gradient(50, 30), "GIF"),
    "moving gif": lambda: frames("GIF"),
    "moving png": lambda: frames("PNG"),
    "webp": lambda: saved(gradient(50, 30), "WEBP"),
    "moving transparent webp": lambda: saved(
        gradient(50, 30, "RGBA"), "WEBP", save_all=True, append_images=[gradient(50, 30, "RGBA")]
    ),
    "bmp": lambda: saved(gradient(50, 30), "BMP"),
    "tiff": lambda: saved(gradient(50, 30), "TIFF"),
    "compressed tiff": lambda: saved(gradient(50, 30), "TIFF", compression="tiff_lzw"),
    "float tiff": lambda: saved(gradient(50, 30, "L").convert("F"), "TIFF"),
    "cmyk tiff": lambda: saved(cmyk(), "TIFF"),
    "lab tiff": lambda: saved(Image.new("LAB", (40, 30), (120, 3, 200)), "TIFF"),
    "png with late exif": late_exif,
    **{f"jpeg turned {n}": functools.partial(rotated, n) for n in range(2, 9)},
    "turned png": lambda: rotated(6, "PNG"),
    "turned webp": lambda: rotated(8, "WEBP"),
    "turned tiff": lambda: rotated(5, "TIFF"),
    "jpeg with a wrong orientation": lambda: rotated(77),
    "jpeg with broken exif": lambda: saved(gradient(40, 24), "JPEG", exif=b"Exif\0\0II*\0\xff\xff"),
}
"""Files by kind. All can be read."""


def png_header(width: int, height: int) -> bytes:
    """A PNG file of a size, without pixels."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in [
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(b"\0")),
            (b"IEND", b""),
        ]
    )


def tiff_with_a_tile(side: int) -> bytes:
    """A TIFF file of 16 x 16 pixels, whose only tile says that it is larger."""
    pixels = zlib.compress(bytes(256))
    entries = [
        (256, 3, 16),
        (257, 3, 16),
        (258, 3, 8),
        (259, 3, 8),
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, side),
        (323, 4, side),
        (324, 4, 8),
        (325, 4, len(pixels)),
    ]
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    start = 8 + len(pixels) + len(pixels) % 2
    head = struct.pack("<2sHI", b"II", 42, start) + pixels + bytes(len(pixels) % 2)
    return head + struct.pack("<H", len(entries)) + table + bytes(4)


def as_file(data: bytes) -> Encoded:
    return Encoded(data, b"")


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
