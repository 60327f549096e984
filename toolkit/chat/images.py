"""Images in a question."""

import base64
from pathlib import Path

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
    format = next((format for begin, format in FORMATS.items() if content.startswith(begin)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        format = "webp"
    if format is None:
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
