"""Images in a question."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from toolkit.chat.answers.client import ChatClient, ModelInfo
from toolkit.client.wire import ServerError
from toolkit.errors import InvalidRequestError
from toolkit.units import size

MAX_BYTES = 20 << 20
FORMATS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)


LABEL = "label"
"""Key of an image's label in saved conversations. It is not sent."""
_LAST_WORD = re.compile(
    r"""(?:^|\s)(?:'(?P<single>[^']+)'|"(?P<double>[^"]+)"|(?P<bare>(?:\\.|[^\s\\])+))\s*\Z"""
)


@dataclass(frozen=True, slots=True)
class AttachedImage:
    """An image for the next question."""

    url: str  # data:
    label: str  # name and size

    def to_part(self) -> dict[str, Any]:
        """Return the part of a message."""
        return {"type": "image_url", "image_url": {"url": self.url}, LABEL: self.label}


def read_image(path: Path) -> AttachedImage:
    """Raises InvalidRequestError for a file that is not an image."""
    url, size = to_data_url(path), _size_of(path)
    return AttachedImage(url, path.name if size is None else f"{path.name} {size[0]}x{size[1]}")


def split_images(line: str) -> tuple[str, list[Path]]:
    """Split the paths of image files from the end of a line.

    They may be quoted or escaped as in a shell, or file: URLs: terminals write a file that is
    dropped so."""
    if is_image(whole := _to_path(line.strip())):
        return "", [whole]
    paths: list[Path] = []
    while found := _LAST_WORD.search(line):
        word = found["single"] or found["double"]
        path = _to_path(word or re.sub(r"\\(.)", r"\1", found["bare"]))
        if not is_image(path):
            break
        paths.insert(0, path)
        line = line[: found.start()]
    return line.rstrip() if paths else line, paths


def is_image(path: Path) -> bool:
    """Return True if a file exists and begins like an image."""
    try:
        with path.open("rb") as file:
            return path.is_file() and _format_of(file.read(16)) is not None
    except (OSError, ValueError):  # a path with NUL
        return False


def to_data_url(path: Path) -> str:
    """Return an image file as a data: URL. Raises InvalidRequestError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"Cannot read {path}: {error.strerror}.") from None
    if len(content) > MAX_BYTES:
        raise InvalidRequestError(
            f"{path} is {size(len(content))}; the limit is {size(MAX_BYTES)}."
        )
    if (format := _format_of(content)) is None:
        raise InvalidRequestError(f"{path} is not a PNG, JPEG, GIF or WebP image.")
    return f"data:image/{format};base64,{base64.b64encode(content).decode()}"


async def why_images_are_refused(client: ChatClient, model: ModelInfo) -> str | None:
    """Return the reason why a model accepts no images; None if it does.

    If the server does not list this, send it an image of one pixel."""
    if model.accepts_images is not None:
        return None if model.accepts_images else "the server lists it without image input."
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]
    body = {"model": model.name, "messages": messages, "max_tokens": 1, "stream": False}
    try:
        async for _ in client.ask(body):
            pass
    except ServerError as error:
        return error.message
    return None


def _format_of(begin: bytes) -> str | None:
    """Return the format of an image by its first bytes; None if it is none."""
    if begin[:4] == b"RIFF" and begin[8:12] == b"WEBP":
        return "webp"
    return next((format for magic, format in FORMATS.items() if begin.startswith(magic)), None)


def _size_of(path: Path) -> tuple[int, int] | None:
    """Return width and height from an image's header; None if it is broken."""
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG", "JPEG", "GIF", "WEBP")) as image:
            return image.size
    except Exception:  # plug-ins raise any type for damaged files
        return None


def _to_path(word: str) -> Path:
    if word.startswith("file://"):
        word = unquote(urlsplit(word).path)
    try:
        return Path(word).expanduser()
    except RuntimeError:  # no such user
        return Path(word)
