"""Decode one picture with Pillow: only in a worker, whose memory and time are limited.

Pillow's plug-ins of other formats are never imported: one of them starts Ghostscript."""

from __future__ import annotations

import binascii
import io
import re
import warnings
from typing import Any
from urllib.parse import unquote_to_bytes

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from toolkit.zygote.worker import RefusedError

PLUGINS = {
    "PNG": (PngImagePlugin,),
    "JPEG": (JpegImagePlugin, MpoImagePlugin),  # of cameras: a JPEG file with several pictures
    "WEBP": (WebPImagePlugin,),
    "GIF": (GifImagePlugin,),
    "BMP": (BmpImagePlugin,),
    "TIFF": (TiffImagePlugin,),
}
"""Formats that are read. If one was not imported, Image.open() would import those of all others."""
SUPPORTED = "PNG, JPEG, WebP, GIF (first frame), BMP and TIFF"
_ORIENTATION = 0x0112  # EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = range(5, 9)  # orientations that exchange width and height
_SPACE = b"\t\n\f\r "
_LATE_CHUNKS = re.compile(rb"eXIf|[itz][TE][Xx][Tt]")
"""Chunks of a PNG file with an orientation, which may be behind its pixels."""


class PictureError(RefusedError):
    """A picture that cannot be read. The message follows the name of its parameter."""


def decode_base64(text: bytes) -> bytes:
    """Decode the base64 text of a data URL as browsers do (WHATWG, forgiving-base64).

    White space is skipped, `=` at the end may be missing, %-escapes are decoded. The URL-safe
    alphabet and all other characters are errors."""
    text = text.translate(None, _SPACE)
    if b"%" in text:
        text = unquote_to_bytes(text).translate(None, _SPACE)
    bare = text.rstrip(b"=")
    padding = len(text) - len(bare)
    if padding and (padding > 2 or len(text) % 4):
        raise _wrong_length(bare, padding)
    try:
        return binascii.a2b_base64(bare + b"=" * (-len(bare) % 4), strict_mode=True)
    except binascii.Error:
        if wrong := re.search(rb"[^A-Za-z0-9+/]", bare):
            raise PictureError(
                f"is not valid base64: it has {_shown(wrong[0])} at position {wrong.start()}"
            ) from None
        raise _wrong_length(bare, padding) from None


def measure(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return (width, height) after EXIF rotation, from the header."""
    image = _open(data, max_pixels)
    width, height = image.size
    # Pillow exchanges the sides of a TIFF file itself.
    if image.format == "TIFF":
        return width, height
    turned = _orientation(image, in_header=not _has_late_chunks(image, data)) in _SIDEWAYS
    if turned:
        return height, width
    return width, height


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return the first frame in RGB, upright."""
    image = _open(data, max_pixels)
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        image.load()
        return to_rgb(to_upright(image))
    except MemoryError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(max_pixels) from None
    except Exception:  # plug-ins raise any type for damaged files
        raise PictureError(
            f"is a {image.format} file of {image.width} x {image.height} pixels that is truncated "
            "or damaged: only a part of them can be decoded"
        ) from None


def to_upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF rotation, as ImageOps.exif_transpose. Unreadable EXIF is no rotation."""
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert as Transformers: transparency over white, the rest as Pillow does."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """Open a file and check its size; nothing is decoded yet."""
    if not data:
        raise PictureError("is an empty file")
    # Our own error shows the size. But Pillow allocates WebP's pixels when it opens the file.
    Image.MAX_IMAGE_PIXELS = max_pixels if data.startswith(b"RIFF") else None
    warnings.simplefilter("ignore")
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(PLUGINS))
    except UnidentifiedImageError:
        raise PictureError(
            f"is not a picture that can be read: its first bytes are {_shown(data[:16])}; "
            f"{SUPPORTED} are supported"
        ) from None
    except Image.DecompressionBombError:
        raise _too_large(max_pixels) from None
    except MemoryError:
        raise
    except Exception:
        raise PictureError(
            f"is a picture whose header is truncated or damaged: its first bytes are "
            f"{_shown(data[:16])}"
        ) from None
    if image.width * image.height > max_pixels:
        raise PictureError(
            f"is a picture of {image.width} x {image.height} pixels; at most {max_pixels:,} are "
            "allowed"
        )
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    return image


def _orientation(image: Image.Image, *, in_header: bool = False) -> Any:
    """Return the EXIF orientation, perhaps only if it is in front of the pixels."""
    try:
        exif = Image.Image.getexif(image) if in_header else image.getexif()
        return exif.get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:
        return 1


def _has_late_chunks(image: Image.Image, data: bytes) -> bool:
    """True if a PNG file may have an orientation behind its pixels: then Pillow decodes them."""
    return image.format == "PNG" and bool(_LATE_CHUNKS.search(data, max(0, data.find(b"IDAT"))))


def _wrong_length(bare: bytes, padding: int) -> PictureError:
    return PictureError(
        f"is not valid base64: it has {len(bare)} characters and {padding} '=' at the end, "
        "which is not a multiple of 4"
    )


def _too_large(max_pixels: int) -> PictureError:
    return PictureError(f"is a picture of more than {max_pixels:,} pixels, which is the limit")


def _shown(data: bytes) -> str:
    return repr(data)[1:]
